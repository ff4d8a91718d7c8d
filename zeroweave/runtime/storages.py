"""The activations that autograd keeps, and how their storages are freed before their owner drops them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from zeroweave._torch.storages import storage_key, storage_use_count, use_count, view_base
from zeroweave.comm.ledger import Gauge
from zeroweave.errors import EngineError
from zeroweave.schedule import Call


def owners_beside(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor, how many owners it has other than `tensors`: variables, containers, autograd nodes."""
    own = _owners([torch.empty(0, device="cpu")])[0]
    return [count - own for count in _owners(tensors)]


def _owners(tensors: Sequence[torch.Tensor]) -> list[int]:
    # The Python object is one of the C++ tensor's owners, and has one reference more while there are others.
    return [sys.getrefcount(tensor) + max(0, use_count(tensor) - 2) for tensor in tensors]


def unshared(tensors: Sequence[torch.Tensor], held: int = 0) -> list[list[torch.Tensor]]:
    """`tensors` by storage, without those whose storage other code could read.

    Other code could read it if one of its tensors has an owner other than `tensors` and the `held` ones that the caller
    accounts for, or if a tensor that is not among `tensors` shares it (a view, or the base of a view).
    """
    owned = owners_beside(tensors)  # before anything here holds them
    views = Counter(id(base) for base in map(view_base, tensors) if base is not None)  # a view owns its base
    groups: dict[int, list[torch.Tensor]] = {}
    kept = set()
    for tensor, count in zip(tensors, owned, strict=True):
        groups.setdefault(storage_key(tensor), []).append(tensor)
        if count > held + views[id(tensor)]:
            kept.add(storage_key(tensor))
    return [group for key, group in groups.items() if key not in kept and not _has_other_views(group)]


def _has_other_views(group: list[torch.Tensor]) -> bool:
    storage = group[0].untyped_storage()
    return storage_use_count(storage) - 1 > len(group)  # one is `storage`


def free_storages(tensors: Sequence[torch.Tensor], threshold: int, held: int = 0) -> int:
    """Frees the storages of `tensors` that have more than `threshold` elements; returns the bytes.

    In order of the current stream: work that was issued on it may still read them. `held`: how many owners other than
    `tensors` the caller accounts for, for each tensor; they must not be read any more. A storage stays if other code
    could read it, see `unshared`. So does memory that is not PyTorch's.
    """
    freed = 0
    for group in unshared(tensors, held):
        storage = group[0].untyped_storage()
        nbytes = storage.nbytes()
        if nbytes > threshold * group[0].itemsize and storage.resizable():
            storage.resize_(0)
            freed += nbytes
    return freed


class Saved:
    """One activation that autograd keeps through the engine's hooks; `home` and `group` where it may be moved."""

    __slots__ = ("__weakref__", "_tensor", "group", "home", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.version = version
        self.home: Home | None = None
        self.group: Group | None = None
        """None: no call has ended since it was saved"""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor. Its values may be read after `Activations.use` only."""
        if self._tensor is None:
            raise EngineError(
                "[ZW407] a backward of an earlier optimizer step's forward: what it saved was freed in engine.step() "
                "(activations.free_threshold_bytes); call backward before engine.step()"
            )
        return self._tensor

    def lies_in(self, home: Home) -> None:
        """Its storage may be moved."""
        self.home = home
        home.saved.add(self)

    def belongs_to(self, group: Group) -> None:
        """A call has ended since it was saved."""
        self.group = group
        if self.home is not None:
            self.home.saved_for(group)

    def take(self) -> torch.Tensor:
        """The tensor, which is removed from here."""
        tensor, self._tensor = self.tensor, None
        if self.home is not None:
            self.home.saved.discard(self)
            self.home = None
        return tensor


class Home:
    """A storage of `nbytes` that saved tensors view; lives as long as one of them."""

    __slots__ = ("__weakref__", "away", "group", "host", "mark", "nbytes", "saved")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.group: Group | None = None
        """the last one that has saved it"""
        self.host: torch.Tensor | None = None
        """uint8 [nbytes]: its content, while it is leaving or away"""
        self.away = False
        """True if its content is in host memory only"""
        self.mark: Any = None
        """the end of its way back, see `CopyStream.mark`"""

    def saved_for(self, group: Group) -> None:
        """A call has saved it."""
        self.group = group

    def leaves(self, copy: torch.Tensor) -> None:
        """Its content is on the way to `copy` in host memory."""
        self.host = copy

    def stays(self) -> None:
        """It does not leave, or not any more."""
        self.host = None

    def gone(self, away: Gauge) -> None:
        """Its content is in host memory only, where `away` counts it."""
        assert self.host is not None
        self.away = True
        count(self.host, away)

    def returns(self, mark: Any) -> None:
        """Its content is on the way back, and there at `mark`."""
        self.away, self.host, self.mark = False, None, mark

    def tensors(self) -> list[torch.Tensor]:
        return [saved.tensor for saved in self.saved]

    @property
    def storage(self) -> torch.UntypedStorage:
        return next(iter(self.saved)).tensor.untyped_storage()


class Group:
    """Activations saved up to the end of a forward call, the `number`-th of its window's equal ones."""

    __slots__ = ("call", "needed", "number", "out", "saved")

    def __init__(self, call: Call, number: int, saved: weakref.WeakSet[Saved]) -> None:
        self.call, self.number, self.saved = call, number, saved
        self.out = False
        """True if the schedule wants it in host memory now"""
        self.needed = False
        """True if a backward has asked for it"""

    def send_out(self) -> None:
        """The schedule wants it in host memory, unless a backward has asked for it."""
        self.out = not self.needed

    def bring_back(self) -> None:
        """The schedule wants it on the device again."""
        self.out = False

    def ask_for(self) -> None:
        """A backward asks for it."""
        self.needed, self.out = True, False

    def homes(self) -> list[Home]:
        """The storages, each once."""
        return list(dict.fromkeys(saved.home for saved in self.saved if saved.home is not None))


def count(content: torch.Tensor, gauge: Gauge) -> None:
    """`gauge` counts the bytes of `content` as long as it lives."""
    gauge.add(content.nbytes)
    weakref.finalize(content, gauge.add, -content.nbytes)
