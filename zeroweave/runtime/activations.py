"""What forwards have saved for backwards that may not come: freed before the optimizer allocates."""

from __future__ import annotations

import weakref

import torch

from zeroweave.errors import EngineError
from zeroweave.runtime.free import free_storages


class Saved:
    """One activation that autograd keeps through the engine's hooks."""

    __slots__ = ("__weakref__", "_tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.version = version

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise EngineError(
                "a backward of an earlier optimizer step's forward: what it saved was freed in engine.step() "
                "(activations.free_threshold_bytes); call backward before engine.step()"
            )
        return self._tensor

    def take(self) -> torch.Tensor:
        """The tensor, which is gone from here."""
        tensor, self._tensor = self.tensor, None
        return tensor


class Activations:
    """The saved activations of `threshold` bytes and more, as long as autograd keeps them; None: of no size."""

    def __init__(self, threshold: int | None) -> None:
        self._threshold = threshold
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.freed = 0
        """bytes, over the engine's life"""

    def save(self, tensor: torch.Tensor, version: int) -> Saved:
        saved = Saved(tensor, version)
        if self._threshold is not None and tensor.untyped_storage().nbytes() >= self._threshold:
            self._saved.add(saved)
        return saved

    def free(self) -> None:
        """Frees what is still kept, but for memory that somebody else can read; its backward is refused."""
        tensors = [saved.take() for saved in self._saved]
        self._saved.clear()
        self.freed += free_storages(tensors, threshold=0)
