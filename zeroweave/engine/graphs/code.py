"""Which attributes and globals a module or a loss reads in a step, and never writes, by its bytecode."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn

_PLAIN: Final = frozenset(nn.Module.__mro__)
"""Classes whose own code is no program's."""
_BETWEEN: Final = frozenset({"COPY", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE"})
"""Instructions between an object and the attribute that is asked of it."""
_AUGMENTED: Final = "SWAP"
"""Stands in front of what `self.x += 1` stores."""


@dataclass
class Names:
    """What some functions ask of their first argument, of `super()`, and of globals, and what they write there."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    read_globals: set[str] = field(default_factory=set)
    written_globals: set[str] = field(default_factory=set)

    def add(self, other: Names) -> None:
        self.read |= other.read
        self.written |= other.written
        self.read_globals |= other.read_globals
        self.written_globals |= other.written_globals

    def scan(self, code: CodeType, own: str | None) -> None:
        """`own`: the name of the first argument, if it is one of these."""
        before, asks_super = "", False
        for each in dis.get_instructions(code):
            name, told = each.opname, each.argval
            if (name in ("LOAD_ATTR", "LOAD_METHOD") and before == "own") or name.startswith("LOAD_SUPER"):
                self.read.add(told)
            elif name in ("STORE_ATTR", "DELETE_ATTR") and before in ("own", _AUGMENTED):
                self.written.add(told)
            elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.read_globals.add(told)
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.written_globals.add(told)
            if name not in _BETWEEN:
                last = told[-1] if isinstance(told, tuple) and told else told
                is_own = own is not None and last == own and ("LOAD_FAST" in name or "LOAD_DEREF" in name)
                before = "own" if is_own or (name == "CALL" and asks_super) else name
                asks_super = told == "super" or (asks_super and name != "CALL")
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self.scan(inner, own if own in inner.co_freevars else None)


def constants_of(things: Iterable[Any]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Objects, and dictionaries of globals, and the names that these modules and losses read there and never write.

    Seen is what a module's forward, or a loss, reaches of its own class: methods and properties that it asks its object
    for. Functions that are called otherwise are not.
    """
    known: dict[tuple[Any, ...], list[tuple[Any, frozenset[str]]]] = {}
    for thing in things:
        for owner, kind, entries in _entries(thing):
            key = kind, *map(id, entries)
            if key not in known:
                known[key] = list(_reached(kind, entries))
            for place, names in known[key]:
                yield owner if place is None else place, names


def _entries(thing: Any) -> Iterator[tuple[Any, type, list[Any]]]:
    """An object, the class to look for its functions in, and those that a step calls."""
    match thing:
        case nn.Module():
            for module in thing.modules():
                own = vars(module).get("forward")
                yield module, type(module), [own, *_of(type(module), "forward"), *_of(type(module), "__call__")]
        case MethodType():
            owner = thing.__self__
            yield owner, owner if isinstance(owner, type) else type(owner), [thing.__func__]
        case partial():
            yield from _entries(thing.func)
        case FunctionType():
            yield None, object, [thing]
        case _:
            yield thing, type(thing), _of(type(thing), "__call__")


def _of(kind: type, name: str) -> list[Any]:
    """What the classes of an object have under a name."""
    return [vars(each)[name] for each in kind.__mro__ if each not in _PLAIN and name in vars(each)]


def _reached(kind: type, entries: Iterable[Any]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Globals, and None for the object itself, and what is read there and never written."""
    names, left, seen = Names(), list(entries), set[int]()
    places: dict[int, tuple[dict[str, Any], Names]] = {}
    while left:
        for function in _functions(left.pop()):
            if id(function.__code__) in seen:
                continue
            seen.add(id(function.__code__))
            code, found = function.__code__, Names()
            found.scan(code, code.co_varnames[0] if code.co_argcount else None)
            left += [each for name in found.read - names.read for each in _of(kind, name)]
            names.add(found)
            places.setdefault(id(function.__globals__), (function.__globals__, Names()))[1].add(found)
    yield None, frozenset(names.read - names.written)
    for held, there in places.values():
        yield held, frozenset(there.read_globals - there.written_globals)


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
