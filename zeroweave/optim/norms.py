"""Norms of gradients, taken as their reductions settle, beside the backward: what clipping has to wait for is less.

For windows of graphs only: on the host each takes longer than it saves on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroweave._torch.foreach import foreach_norms
from zeroweave._torch.storages import version
from zeroweave.comm.pending import Beside, Side, beside


class EarlyNorms:
    """Those of one window. `shard(bucket)` gives its gradient. `side`: where they are taken; None: where all runs."""

    def __init__(self, shard: Callable[[int], torch.Tensor | None], side: Side | None) -> None:
        self._shard, self._side = shard, side
        self._known: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """by bucket, a gradient, its version, and its norm"""
        self._under_way: list[Beside] = []
        self._over = False

    def settled(self, bucket: int) -> None:
        """A reduction of the bucket has settled: its gradient is what it is, as far as is known."""
        if self._over or (gradient := self._shard(bucket)) is None or not gradient.numel():
            return
        with beside(self._side):
            (norm,) = foreach_norms([gradient])
        self._known[bucket] = gradient, version(gradient), norm
        self._under_way.append(Beside() if self._side is None else self._side.pending(gradient))

    def of(self, gradients: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The norms of these, by bucket. What was taken of others, or of what they were before, is forgotten."""
        while self._under_way:
            self._under_way.pop().wait()
        known, self._known = self._known, {}
        norms: list[torch.Tensor] = []
        for bucket, gradient in gradients.items():
            of, when, norm = known.get(bucket, (None, 0, gradient))
            norms.append(norm if of is gradient and when == version(gradient) else foreach_norms([gradient])[0])
        return norms

    def end(self) -> frozenset[int]:
        """No more of them: who wanted them has them. Nothing was updated."""
        self._over = True
        return frozenset()
