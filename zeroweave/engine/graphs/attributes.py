"""Numbers and words that modules and losses have at hand where their code names them: a graph has them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn

from zeroweave.engine.graphs.nest import CONSTANTS

_APART: Final = frozenset({"training"})
"""What belongs to a call, as `Surroundings` tells, and may be another one in between."""
_NO_STEP: Final = frozenset({"__init__", "extra_repr", "reset_parameters"})
"""Functions of modules that no step calls."""
_MISSING: Final = object()

_Check = tuple[Callable[[Any], tuple[object, ...]], Any, tuple[object, ...]]
"""How to look again: a function, what to give it, and what it has to return."""


class Attributes:
    """What attributes and globals were when they were looked at first."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[str, object]]] = {}
        """by `id`: an object or a dictionary of globals, and its values by name"""

    def look(self, things: Iterable[Any]) -> None:
        """At those of modules, and of functions and what else can be called."""
        for owner, names in _named(things):
            _, values = self._known.setdefault(id(owner), (owner, {}))
            for name in names - values.keys() - _APART:
                if _is_plain(value := _value(owner, name)):
                    values[name] = value

    def now(self) -> dict[tuple[int, str], object]:
        """What they are now, by the `id` of the owner and by name."""
        return {(key, name): _value(owner, name) for key, (owner, values) in self._known.items() for name in values}

    def changed(self, before: Mapping[tuple[int, str], object]) -> str | None:
        """The name of one that is something else than before."""
        now = self.now()
        return next((name for (key, name), value in before.items() if not _is_same(now[key, name], value)), None)

    def lasting(self) -> Constants:
        """Those that are what they were. The code itself writes the others, and its graph differs if it uses them."""
        checks: list[_Check] = []
        for owner, values in self._known.values():
            same = {name: value for name, value in values.items() if _is_same(_value(owner, name), value)}
            own = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
            checks += _checks(itemgetter, own, {name: value for name, value in same.items() if name in own})
            checks += _checks(attrgetter, owner, {name: value for name, value in same.items() if name not in own})
        return Constants(checks)


def _checks(getter: Callable[..., Callable[[Any], Any]], owner: Any, values: dict[str, object]) -> Iterator[_Check]:
    if values:
        names, known = list(values), list(values.values())
        yield getter(names[0], *names), owner, (known[0], *known)  # a getter of two or more gives a tuple


class Constants:
    """Are attributes still what they were? Asked before each window."""

    def __init__(self, checks: Sequence[_Check] = ()) -> None:
        self._checks = checks

    def hold(self) -> bool:
        try:
            found = ((get(owner), values) for get, owner, values in self._checks)
            return all(all(map(is_, now, values)) or all(map(_is_same, now, values)) for now, values in found)
        except (AttributeError, KeyError):  # one is gone
            return False


def _is_plain(value: Any) -> bool:
    return isinstance(value, CONSTANTS) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _is_same(now: Any, value: object) -> bool:
    return now is value or (_is_plain(now) and repr(now) == repr(value))


def _value(owner: Any, name: str) -> object:
    """Nothing is computed for it: what a property gives is no attribute."""
    if isinstance(owner, dict):
        return owner.get(name, _MISSING)
    kept = getattr(owner, "__dict__", {})
    if name in kept:
        return kept[name]
    return next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), _MISSING)


def _named(things: Iterable[Any]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Objects and globals, and the names that the code of these things looks up there."""
    known: dict[type, list[FunctionType]] = {}
    for thing in things:
        match thing:
            case nn.Module():
                for module in thing.modules():
                    if type(module) not in known:
                        known[type(module)] = list(_functions(type(module)))
                    yield from _of(module, [*known[type(module)], *_own_forward(module)])
            case MethodType():
                yield from _of(thing.__self__, [thing.__func__])
            case FunctionType():
                yield from _of(None, [thing])
            case partial():
                yield from _named([thing.func])
            case _ if isinstance(call := type(thing).__call__, FunctionType):
                yield from _of(thing, [call])


def _of(owner: Any, functions: Iterable[Any]) -> Iterator[tuple[Any, frozenset[str]]]:
    for function in map(unwrap, functions):
        if isinstance(function, FunctionType):
            names = frozenset(_names(function.__code__))
            yield function.__globals__, names
            if owner is not None:
                yield owner, names


def _functions(kind: type) -> Iterator[FunctionType]:
    """Those of a module's classes, but for what all modules have."""
    for each in kind.__mro__:
        if each in nn.Module.__mro__:
            return
        for value in (value for name, value in vars(each).items() if name not in _NO_STEP):
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType):
                yield value


def _own_forward(module: nn.Module) -> list[Any]:
    """One that was put in the place of its class's."""
    forward = vars(module).get("forward")
    return [] if forward is None else [getattr(forward, "__func__", forward)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
