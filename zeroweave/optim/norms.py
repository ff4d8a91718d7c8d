"""Norms of gradients, taken as their reductions settle, beside the backward: what clipping has to wait for is less.

For windows of graphs only: on the host each takes longer than it saves on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroweave._torch.storages import version
from zeroweave.comm.pending import Beside, Side, beside
from zeroweave.optim.clip import norms_of


class EarlyNorms:
    """Those of one window. `side`: where they are taken; None: where all runs."""

    def __init__(self, side: Side | None) -> None:
        self._side = side
        self._known: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """by bucket, a gradient, its version, and its norm"""
        self._under_way: list[Beside] = []

    def settled(self, bucket: int, gradient: torch.Tensor) -> None:
        """A reduction of the bucket has settled: its gradient is this, as far as is known."""
        if not gradient.numel():
            return
        with beside(self._side):
            (norm,) = norms_of([gradient])
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
            norms.append(norm if of is gradient and when == version(gradient) else norms_of([gradient])[0])
        return norms
