"""Activations saved for backwards: they may be kept in host memory, and are freed before the optimizer allocates."""

from __future__ import annotations

import weakref

import torch

from zeroweave.runtime.activation_offload import Offloading
from zeroweave.runtime.storages import Saved, free_storages
from zeroweave.schedule import Call


class Activations:
    """The saved activations, as long as autograd keeps them.

    Those of `threshold` bytes and more can be freed; None: of no size. `offloading` moves them; None: nothing does.
    """

    def __init__(self, threshold: int | None, offloading: Offloading | None = None) -> None:
        self._threshold = threshold
        self.offloading = offloading
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.freed = 0
        """bytes, over the engine's life"""

    @property
    def moves(self) -> bool:
        """True if some may be freed early, or live in host memory for a time."""
        return self._threshold is not None or self.offloading is not None

    def save(self, tensor: torch.Tensor, version: int) -> Saved:
        """The object that autograd keeps in the place of a tensor at this version."""
        saved = Saved(tensor, version)
        if self._threshold is not None and tensor.untyped_storage().nbytes() >= self._threshold:
            self._saved.add(saved)
        if self.offloading is not None:
            self.offloading.add(saved)
        return saved

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        if self.offloading is not None:
            self.offloading.begin_forward()

    def end_call(self, call: Call, number: int) -> None:
        """A forward call is over, the `number`-th of the window's equal ones."""
        if self.offloading is not None:
            self.offloading.end_call(call, number)

    def use(self, saved: Saved) -> torch.Tensor:
        """The tensor, whose values a backward may read from now on."""
        if self.offloading is not None:
            self.offloading.use(saved)
        return saved.tensor

    def free(self) -> None:
        """Frees what is still kept, except for memory that other code can read; its backward is refused."""
        if self.offloading is not None:
            self.offloading.settle()
        tensors = [saved.take() for saved in self._saved]
        self._saved.clear()
        self.freed += free_storages(tensors, threshold=0)
