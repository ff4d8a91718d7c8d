"""Tensors in nested containers: what a call of a graph is given, and what it returns."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, MutableMapping, Sequence
from copy import copy as shallow
from dataclasses import dataclass, is_dataclass
from typing import Any, Final

import torch

from zeroweave._torch.fx import flatten, unflatten

CONSTANTS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Uncapturable(Exception):
    """Why a step cannot be a graph."""


@dataclass(frozen=True)
class _Object:
    """A container that PyTorch does not know: a mapping, or a dataclass. `like`: one of them.

    `parts`: the items of a mapping, by `names`, then what the object keeps beside them, by `kept`: the fields, and
    whatever else was set.
    """

    like: Any
    names: tuple[Any, ...]
    kept: tuple[str, ...]
    parts: Any

    def __repr__(self) -> str:
        return f"{type(self.like)!r} {self.names!r} {self.kept!r} {self.parts!r}"

    def of(self, parts: Sequence[Any]) -> Any:
        """Another one, which keeps what this one did when it was taken apart, and nothing that was computed since."""
        made = shallow(self.like)
        if isinstance(made, MutableMapping):
            made.update(zip(self.names, parts, strict=False))
        if hasattr(made, "__dict__"):
            there = vars(made)  # written also where it is frozen
            for name in _kept(made).keys() - set(self.kept):
                there.pop(name)
            there.update(zip(self.kept, parts[len(self.names) :], strict=True))
        return made


def _kept(value: Any) -> dict[str, Any]:
    """The attributes of an object, but for that in which a `UserDict` has its items."""
    found = dict(getattr(value, "__dict__", {}))
    if isinstance(value, UserDict):
        del found["data"]
    return found


class Nest:
    """The tensors of nested containers, each once, and how they are nested.

    `what`, for people, has the containers; Uncapturable for what no graph can read, or make again.
    """

    def __init__(self, value: Any, what: str) -> None:
        self.tensors: list[torch.Tensor] = []
        """each once"""
        self._what, self._seen = what, dict[int, int]()
        self._form = self._taken_apart(value)

    def _taken_apart(self, value: Any) -> tuple[list[Any], Any]:
        """The leaves, and how they are nested. A leaf is an index of `tensors`, a constant in a tuple, or an object."""
        leaves, structure = flatten(value)
        return [self._leaf(leaf) for leaf in leaves], structure

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._seen:
                self._seen[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            return self._seen[id(leaf)]
        if isinstance(leaf, CONSTANTS):
            return (leaf,)
        if isinstance(leaf, MutableMapping):
            return self._object(leaf, tuple(leaf))
        if is_dataclass(leaf) and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            return self._object(leaf, ())
        raise Uncapturable(f"{self._what} a {type(leaf).__name__}, which no graph can read or make again")

    def _object(self, value: Any, names: tuple[Any, ...]) -> _Object:
        kept = _kept(value)
        return _Object(value, names, tuple(kept), self._taken_apart([*(value[name] for name in names), *kept.values()]))

    @property
    def form(self) -> tuple[str, str]:
        """Equal for nests that differ in their tensors only."""
        leaves, structure = self._form
        return repr(structure), repr(leaves)

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same containers, of other tensors."""
        return _put_together(*self._form, tensors)


def _put_together(leaves: Iterable[Any], structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    made = []
    for leaf in leaves:
        match leaf:
            case int():
                made.append(tensors[leaf])
            case _Object(parts=(inner, nested)):
                made.append(leaf.of(_put_together(inner, nested, tensors)))
            case (constant,):
                made.append(constant)
    return unflatten(made, structure)


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """The current stream copies `sources` into `targets`."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """New tensors like these, in the same shapes and strides."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
