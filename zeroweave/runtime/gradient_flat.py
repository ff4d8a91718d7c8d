"""The flat that a bucket's gradients are reduced from, where they are written right into it.

    lend      a compiled backward gets a slot's place, before it runs
    came      the gradient is there, or one in other memory
    collect   what is not there yet is copied, and the flat goes into the reduction

A gradient in other memory is an ordinary part. A bucket that has only those has no flat here. But a gradient that is
all of its bucket, in memory that no other tensor shares, is the flat itself: reductions may write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroweave._torch.storages import contiguous_stride, reinterpreted
from zeroweave.comm.transport import Parts, lay_out
from zeroweave.runtime.bucket import Bucket

Lend = Callable[[int, torch.dtype], torch.Tensor | None]


class GradientFlat:
    """That of one bucket, in the dtype of its gradients. It is for one reduction, then there is another.

    Until that is issued it counts as what a backward computes with; see `Reductions`.
    """

    def __init__(self, bucket: Bucket, lend: Lend | None = None) -> None:
        self._bucket, self._lend = bucket, lend or (lambda numel, dtype: None)
        self._flat: torch.Tensor | None = None
        self._lent: dict[int, torch.Tensor] = {}
        """slot -> its place, which may be written at any time"""
        self._there: set[int] = set()
        """slots whose gradient is in its place"""
        self._whole: torch.Tensor | None = None
        """a gradient that is the flat"""
        self.collected = 0
        """gradients that went into reductions from where they were written"""

    def clear(self) -> None:
        """Forgets the flat. A tensor that views a part of it keeps its memory."""
        self._flat, self._lent, self._there, self._whole = None, {}, set(), None

    def lend(self, slot: int) -> torch.Tensor | None:
        """The place of a slot, of its shape, to be written; None if it is lent or filled already, or is not aligned.

        Kernels that were compiled for aligned memory would write elsewhere, and the result would be copied.
        """
        if slot in self._lent or slot in self._there or not self._bucket.is_aligned(slot):
            return None
        layout = self._bucket.layout
        place = layout.slots[slot]
        if self._flat is None:
            self._flat = self._lend(layout.numel, self._bucket.dtype)
            if self._flat is None:
                self._flat = torch.empty(layout.numel, dtype=self._bucket.dtype, device=self._bucket.device)
        view = self._lent[slot] = reinterpreted(self._flat, place.shape, contiguous_stride(place.shape), place.offset)
        return view

    def came(self, slot: int, gradient: torch.Tensor, made: bool = False) -> None:
        """The gradient of a slot is this from now on. `made`: True if no other tensor shares its memory."""
        self._whole = gradient if made and gradient.numel() == self._bucket.layout.numel else None
        if self._lent.pop(slot, None) is gradient:
            self._there.add(slot)
        else:
            self._there.discard(slot)

    @torch.no_grad()
    def collect(self, parts: Mapping[int, torch.Tensor]) -> Parts:
        """Returns one flat with all parts if some gradient was written into it, otherwise `parts` as they are.

        `parts`: the gradients that `came` was told of. They are returned as they are, too, if a place is still lent: a
        reduction would read it while it may be written.
        """
        flat, there, lent, whole = self._flat, self._there, self._lent, self._whole
        self.clear()
        if whole is not None:
            self.collected += 1
            return whole.view(-1)
        if flat is None or lent or not there:
            return parts
        lay_out(flat, parts, self._bucket.layout, there)
        self.collected += len(there)
        return flat
