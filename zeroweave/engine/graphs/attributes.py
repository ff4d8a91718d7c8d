"""Numbers and words that modules and losses read and never write: a graph has them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from numbers import Number
from operator import is_, itemgetter
from types import MemberDescriptorType
from typing import Any, Final

from torch import nn

from zeroweave.engine.graphs.code import constants_of
from zeroweave.engine.graphs.nest import CONSTANTS

_APART: Final = frozenset({"training"})
"""What belongs to a call, as `Surroundings` tells, and may be another one in between."""
_PLAIN: Final = (*CONSTANTS, Number, Enum)
_MISSING: Final = object()
"""Nothing is there."""
_OTHER: Final = object()
"""Something else is there."""

_Known = Mapping[int, tuple[Any, Mapping[str, object]]]
"""By `id`: an object or a dictionary of globals, and by name what was there: a number or word, or one of these two."""


class Attributes:
    """What attributes and globals were when they were looked at first."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[str, object]]] = {}

    def look(self, things: Iterable[Any]) -> None:
        """At those of modules, and of functions and what else can be called."""
        for owner, names in constants_of(things):
            if owner is not None:
                _, values = self._known.setdefault(id(owner), (owner, {}))
                values.update((name, _state(_value(owner, name))) for name in names - values.keys() - _APART)

    def now(self) -> dict[tuple[int, str], object]:
        """What they are now, by the `id` of the owner and by name."""
        known = ((key, owner, name) for key, (owner, values) in self._known.items() for name in values)
        return {(key, name): _state(_value(owner, name)) for key, owner, name in known}

    def changed(self, before: Mapping[tuple[int, str], object]) -> str | None:
        """The name of one that is something else than before."""
        now = self.now()
        return next((name for (key, name), state in before.items() if not _is_same(now[key, name], state)), None)

    def lasting(self) -> Constants:
        """Those that are what they were. Hooks and the like write the others, and a graph that uses them differs."""
        return Constants(
            {
                key: (owner, {n: state for n, state in values.items() if _is_same(_value(owner, n), state)})
                for key, (owner, values) in self._known.items()
            }
        )


class Constants:
    """Are attributes still what they were? Asked before each window."""

    def __init__(self, known: _Known | None = None) -> None:
        self._quick: list[tuple[Callable[[], Mapping[str, Any]], itemgetter[Any], tuple[object, ...]]] = []
        """where to look, for what, and what is there"""
        self._rest: list[tuple[Any, str, object]] = []
        for owner, states in (known or {}).values():
            held = _held(owner)
            own = [name for name, state in states.items() if name in held and state is not _OTHER]
            if own:
                names = own[0], *own  # a getter of two names or more gives a tuple
                self._quick.append((partial(_held, owner), itemgetter(*names), tuple(states[name] for name in names)))
            self._rest += [(owner, name, state) for name, state in states.items() if name not in own]

    def hold(self) -> bool:
        try:
            found = ((get(where()), states) for where, get, states in self._quick)
            return all(all(map(is_, now, states)) or all(map(_is_same, now, states)) for now, states in found) and all(
                _is_same(_value(owner, name), state) for owner, name, state in self._rest
            )
        except Exception:  # one is gone, or objects of a program's own class cannot be asked now
            return False


def _held(owner: Any) -> Mapping[str, Any]:
    return owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})


def _value(owner: Any, name: str) -> object:
    """Nothing is computed for it: what a property gives is no attribute. Methods and submodules are none, either."""
    held = _held(owner)
    if name in held or isinstance(owner, dict):
        return held.get(name, _MISSING)
    if isinstance(owner, nn.Module):
        for kept in (owner._buffers, owner._parameters, owner._modules):
            if name in kept:
                return kept[name]
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    value = next((vars(kind)[name] for kind in kinds if name in vars(kind)), _MISSING)
    return value.__get__(owner) if isinstance(value, MemberDescriptorType) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _state(value: object) -> object:
    return value if value is _MISSING or _is_plain(value) else _OTHER


def _is_same(now: Any, state: object) -> bool:
    """Is what is there now what was there?"""
    if now is state:
        return True
    if state is _OTHER or state is _MISSING or not _is_plain(now):
        return _state(now) is state
    try:
        return type(now) is type(state) and bool(now == state or (now != now and state != state))
    except Exception:  # numbers of a program's own class
        return False
