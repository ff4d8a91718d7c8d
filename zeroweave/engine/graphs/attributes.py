"""Numbers and words that modules and losses read and never write: a graph has them as they were."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from numbers import Number
from operator import attrgetter, call, is_, itemgetter
from types import MemberDescriptorType
from typing import Any, Final

import numpy
from torch import nn

from zeroweave.engine.graphs.code import constants_of
from zeroweave.engine.graphs.held import attributes_of
from zeroweave.engine.graphs.nest import CONSTANTS

_APART: Final = frozenset({"training"})
"""What belongs to a call, as `Surroundings` tells, and may be another one in between."""
_PLAIN: Final = (*CONSTANTS, Number, Enum, numpy.bool_)
_DICTIONARY: Final = attrgetter("__dict__")
_MISSING: Final = object()
"""Nothing is there."""
_OTHER: Final = object()
"""Something else is there."""


class Attributes:
    """What attributes and globals were when they were looked at first: numbers and words, or something else."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[str, object]]] = {}
        """by `id`: an object or a dictionary of globals, and what was there, by name"""

    def look(self, things: Iterable[Any]) -> None:
        """At those of modules, and of functions and what else can be called."""
        for owner, names in constants_of(things):
            _, values = self._known.setdefault(id(owner), (owner, {}))
            new = ((name, _value(owner, name)) for name in names - values.keys() - _APART - vars(builtins).keys())
            values.update((name, value) for name, value in new if not _is_part(owner, name, value))

    @property
    def changed(self) -> str | None:
        """The name of one that is another one now."""
        known = ((owner, name, value) for owner, values in self._known.values() for name, value in values.items())
        return next((name for owner, name, value in known if not _is_same(_value(owner, name), value)), None)

    def constants(self) -> Constants:
        return Constants(self._known.values())


class Constants:
    """Are attributes still what they were? Asked before each window that might be replayed.

    A model has thousands of them: they are asked for in few calls, and compared one by one only where any is another
    object.
    """

    def __init__(self, known: Iterable[tuple[Any, Mapping[str, object]]] = ()) -> None:
        self._owners: list[Any] = []
        self._theirs: list[Mapping[str, Any]] = []
        """their dictionaries, and"""
        self._held: list[Mapping[str, Any]] = []
        """these with those of globals"""
        self._getters: list[itemgetter[Any]] = []
        """for each of them; what they get is, one behind the other:"""
        self._values: list[object] = []
        self._absent: list[tuple[frozenset[str], Mapping[str, Any]]] = []
        """what an object has of its class, or not at all, and where it would have its own"""
        self._rest: dict[tuple[int, str], tuple[Any, str, object]] = {}
        """what lies elsewhere: an object, or a class, a name, and what is there"""
        for owner, values in known:
            if values:
                self._add(owner, _attributes(owner), values)

    def _add(self, owner: Any, there: Mapping[str, Any], values: Mapping[str, object]) -> None:
        if there is not owner and hasattr(owner, "__dict__") and not isinstance(owner, type):
            self._owners.append(owner)
            self._theirs.append(there)
        if own := [name for name in values if name in there]:
            names = own[0], *own  # a getter of two names or more gives a tuple
            self._held.append(there)
            self._getters.append(itemgetter(*names))
            self._values += (values[name] for name in names)
        if not (absent := values.keys() - there.keys()):
            return
        self._absent.append((frozenset(absent), there))
        if isinstance(owner, nn.Module):
            self._absent.append((frozenset(absent - owner._buffers.keys()), owner._buffers))
        for name in absent if there is not owner else ():
            where = _kind(owner) if _of_class(owner, name) is values[name] else owner
            self._rest[id(where), name] = where, name, values[name]

    def hold(self) -> bool:
        try:
            return (
                all(map(is_, map(_DICTIONARY, self._owners), self._theirs))
                and all(names.isdisjoint(there) for names, there in self._absent)
                and (all(map(is_, self._now(), self._values)) or all(map(_is_same, self._now(), self._values)))
                and all(_is_same(_value(owner, name), value) for owner, name, value in self._rest.values())
            )
        except Exception:  # one is gone, or objects of a program's own class cannot be asked now
            return False

    def _now(self) -> Iterator[object]:
        return chain.from_iterable(map(call, self._getters, self._held))


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Its own; of globals, which are plain dictionaries, all of them."""
    return owner if type(owner) is dict else getattr(owner, "__dict__", {})


def _value(owner: Any, name: str) -> object:
    """Nothing is computed for it: what a property gives is no attribute."""
    there = _attributes(owner)
    if name in there or there is owner:
        return there.get(name, _MISSING)
    if isinstance(owner, nn.Module):
        for kept in (owner._buffers, owner._parameters, owner._modules):
            if name in kept:
                return kept[name]
    value = _of_class(owner, name)
    return attributes_of(owner).get(name, _MISSING) if isinstance(value, MemberDescriptorType) else value


def _of_class(owner: Any, name: str) -> object:
    return next((vars(kind)[name] for kind in _kind(owner).__mro__ if name in vars(kind)), _MISSING)


def _kind(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _is_part(owner: Any, name: str, value: object) -> bool:
    """Is it a parameter or module of a module, or a method? Those are seen otherwise, and change the graph."""
    if isinstance(owner, nn.Module) and (name in owner._parameters or name in owner._modules):
        return True
    return name not in _attributes(owner) and value is not _MISSING and not _is_plain(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _state(value: object) -> object:
    return value if value is _MISSING or _is_plain(value) else _OTHER


def _is_same(now: Any, value: Any) -> bool:
    """Is what is there now the same number or word as before, or something else as before?"""
    if now is value:
        return True
    if not _is_plain(now) or not _is_plain(value):
        return _state(now) is _state(value)
    try:
        return type(now) is type(value) and bool(now == value or (now != now and value != value))
    except Exception:  # numbers of a program's own class
        return False
