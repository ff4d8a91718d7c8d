"""Reduce buckets: gradients wait until there are enough of them for one collective.

A bucket that waits holds references only. Its storage is the staging flat of a reduction: as large as the gradients in
it, allocated from the flush until the result is settled. A gradient above the size makes one larger flat, once, and
nothing is left when the backward is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from zeroweave.runtime.reductions import Reductions


class ReduceBuckets:
    """One bucket for each dtype and `kind` of gradient; at most `depth` reductions are in flight.

    `size` is in elements. `start(parts)` issues the reduction of {id: gradient} on `reductions`. All ranks add
    the same gradients in the same order.
    """

    def __init__(
        self, size: int, depth: int, reductions: Reductions, start: Callable[[dict[int, torch.Tensor]], None]
    ) -> None:
        self._size, self._depth = size, depth
        self._reductions, self._start = reductions, start
        self._waiting: dict[tuple[str, Hashable], dict[int, torch.Tensor]] = {}
        self._numels: Counter[tuple[str, Hashable]] = Counter()

    def add(self, key: int, gradient: torch.Tensor, kind: Hashable) -> None:
        """One more gradient; first flushes the bucket that it does not fit into, then the one that it fills."""
        name = (str(gradient.dtype), kind)
        parts = self._waiting.get(name, {})
        if key in parts:
            parts[key] = parts[key] + gradient  # out of place: a gradient may be a tensor that the graph still reads
            return
        if parts and self._numels[name] + gradient.numel() > self._size:
            self._flush(name)
        self._waiting.setdefault(name, {})[key] = gradient
        self._numels[name] += gradient.numel()
        if self._numels[name] >= self._size:
            self._flush(name)

    def flush(self) -> None:
        """Starts the reduction of everything that waits, in the order in which the buckets were begun."""
        for name in list(self._waiting):
            self._flush(name)

    def _flush(self, name: tuple[str, Hashable]) -> None:
        parts = self._waiting.pop(name)
        del self._numels[name]
        while len(flying := self._reductions.in_flight) >= self._depth:
            self._reductions.settle(flying[0])
        self._start(parts)

    def abort(self) -> None:
        """Forgets everything that waits."""
        self._waiting.clear()
        self._numels.clear()
