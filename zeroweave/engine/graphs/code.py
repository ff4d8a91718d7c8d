"""Which attributes and globals a module or a loss reads in a step, and never writes, by its bytecode."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn

from zeroweave.engine.graphs.around import content_of

_TORCHS: Final = frozenset(nn.Module.__mro__)
"""Classes whose own code is no program's."""
_BETWEEN: Final = frozenset({"PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE"})
"""Instructions that change nothing of what an attribute is asked of."""

Reads = tuple[Any, frozenset[str]]
"""An object or a dictionary of globals, and names."""


@dataclass
class Names:
    """What some functions ask of their first argument, of `super()`, and of globals, and what they write there."""

    read: set[str] = field(default_factory=set)
    of_super: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    read_globals: set[str] = field(default_factory=set)
    written_globals: set[str] = field(default_factory=set)

    def add(self, other: Names) -> None:
        self.read |= other.read
        self.of_super |= other.of_super
        self.written |= other.written
        self.read_globals |= other.read_globals
        self.written_globals |= other.written_globals

    def scan(self, code: CodeType, own: str | None) -> None:
        """`own`: the name of the first argument, if it is one of these."""
        before, asks_super, augmented = "", False, set[str]()
        for each in dis.get_instructions(code):
            name, told = each.opname, each.argval
            match name:
                case "LOAD_ATTR" | "LOAD_METHOD" if before in ("own", "copy of own"):
                    self.read.add(told)
                    if before == "copy of own":  # as of `self.x += 1`
                        augmented.add(told)
                case "LOAD_ATTR" | "LOAD_METHOD" if before == "super":
                    self.of_super.add(told)
                case "LOAD_SUPER_ATTR" | "LOAD_SUPER_METHOD":
                    self.of_super.add(told)
                case "STORE_ATTR" | "DELETE_ATTR" if before == "own" or (before == "SWAP" and told in augmented):
                    self.written.add(told)
                case "LOAD_GLOBAL" | "LOAD_NAME":
                    self.read_globals.add(told)
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    self.written_globals.add(told)
            if name not in _BETWEEN:
                before = self._what(name, told, own, before, asks_super)
                asks_super = told == "super" or (asks_super and name != "CALL")
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.scan(inner, own if own in inner.co_freevars else None)

    @staticmethod
    def _what(name: str, told: Any, own: str | None, before: str, asks_super: bool) -> str:
        """What an instruction has put on the stack, as far as it is known; else its name."""
        if own is not None and ("LOAD_FAST" in name or "LOAD_DEREF" in name):
            last = told[-1] if isinstance(told, tuple) and told else told
            return "own" if last == own else name
        if name == "COPY" and before == "own":
            return "copy of own"
        return "super" if name == "CALL" and asks_super else name


def constants_of(things: Iterable[Any]) -> Iterator[Reads]:
    """What these modules and losses read and never write.

    Seen is what a module's forward, or a loss, reaches: methods and properties that it asks its own object for, and
    functions of the same file that it names. A loss that is a function may call another object that it has at hand.
    """
    known: dict[tuple[Any, ...], list[Reads]] = {}
    for thing in things:
        for owner, kind, entries in _entries(thing, []):
            key = kind, *map(id, entries)
            if key not in known:
                known[key] = list(_reached(kind, entries))
            for place, names in known[key]:
                if place is not None or owner is not None:
                    yield owner if place is None else place, names


def _entries(thing: Any, seen: list[Any]) -> Iterator[tuple[Any, type, list[Any]]]:
    """An object, the class to look for its functions in, and those that a step calls."""
    if any(thing is each for each in seen):
        return
    seen.append(thing)
    match thing:
        case nn.Module():
            for module in thing.modules():
                own, kind = vars(module).get("forward"), type(module)
                yield module, kind, [*_of(kind, "forward")[:1], *_of(kind, "__call__")[:1]] if own is None else [own]
        case MethodType():
            owner = thing.__self__
            yield owner, owner if isinstance(owner, type) else type(owner), [thing.__func__]
        case partial():
            yield from _entries(thing.func, seen)
        case FunctionType():
            yield None, object, [thing]
            for other in _at_hand(thing):
                if isinstance(other, nn.Module | MethodType | partial) or (
                    callable(other) and not isinstance(other, type | FunctionType) and _of(type(other), "__call__")
                ):
                    yield from _entries(other, seen)
        case _:
            yield thing, type(thing), _of(type(thing), "__call__")[:1]


def _at_hand(function: FunctionType) -> Iterator[Any]:
    """What its closure has, and the globals that it names."""
    yield from map(content_of, function.__closure__ or ())
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def _of(kind: type, name: str) -> list[Any]:
    """What the classes of an object have under a name: the first is its own, the others are asked for by `super()`."""
    return [vars(each)[name] for each in kind.__mro__ if each not in _TORCHS and name in vars(each)]


def _reached(kind: type, entries: Iterable[Any]) -> Iterator[Reads]:
    """Globals, and None for the object itself, and what is read there and never written."""
    names, left, seen = Names(), [(entry, True) for entry in entries], set[int]()
    places: dict[int, tuple[dict[str, Any], Names]] = {}
    while left:
        value, is_own = left.pop()
        for function in _functions(value):
            if id(function.__code__) in seen:
                continue
            seen.add(id(function.__code__))
            code, found = function.__code__, Names()
            of_object = is_own and code.co_argcount and not isinstance(value, staticmethod)
            found.scan(code, code.co_varnames[0] if of_object else None)
            left += [(each, True) for name in found.read for each in _of(kind, name)[:1]]
            left += [(each, True) for name in found.of_super for each in _of(kind, name)[1:]]
            named = (function.__globals__.get(name) for name in found.read_globals)
            left += [(each, False) for each in named if _is_beside(each, function)]
            names.add(found)
            places.setdefault(id(function.__globals__), (function.__globals__, Names()))[1].add(found)
    yield None, frozenset(names.read - names.written)
    for held, there in places.values():
        yield held, frozenset(there.read_globals - there.written_globals)


def _is_beside(value: Any, function: FunctionType) -> bool:
    """Is it a function of the same file?"""
    return isinstance(value, FunctionType) and value.__globals__ is function.__globals__


def _functions(value: Any) -> Iterator[FunctionType]:
    """Those of a method, property or wrapper, with what it wraps."""
    seen: list[Any] = []
    while value is not None and not any(value is each for each in seen):
        seen.append(value)
        if isinstance(value, FunctionType):
            yield value
            value = getattr(value, "__wrapped__", None)
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, MethodType | staticmethod | classmethod):
            value = value.__func__
        else:
            value = value.func if isinstance(value, partial | cached_property) else None
