"""Reduce buckets: gradients wait until there are enough of them for one collective.

A bucket that waits holds references only. Its storage is the staging flat of a reduction: as large as what has
come together, there from the flush until the result is settled. So a gradient above the size makes one larger
flat, once, and nothing is left when the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from zeroweave.runtime.reductions import Reductions


@dataclass(slots=True)
class _Waiting:
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    numel: int = 0

    def add(self, key: int, gradient: torch.Tensor) -> None:
        self.parts[key] = gradient
        self.numel += gradient.numel()


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
        self._waiting: dict[tuple[str, Hashable], _Waiting] = {}

    def add(self, key: int, gradient: torch.Tensor, kind: Hashable) -> None:
        """One more gradient; first flushes the bucket that it does not fit into, then the one that it fills."""
        name = (str(gradient.dtype), kind)
        waiting = self._waiting.setdefault(name, _Waiting())
        if key in waiting.parts:
            # out of place: a gradient may be a tensor that the graph still reads
            waiting.parts[key] = waiting.parts[key] + gradient
            return
        if waiting.parts and waiting.numel + gradient.numel() > self._size:
            self._flush(name)
            waiting = self._waiting.setdefault(name, _Waiting())
        waiting.add(key, gradient)
        if waiting.numel >= self._size:
            self._flush(name)

    def flush(self) -> None:
        """Starts the reduction of everything that waits, in the order in which the buckets were begun."""
        for name in list(self._waiting):
            self._flush(name)

    def _flush(self, name: tuple[str, Hashable]) -> None:
        waiting = self._waiting.pop(name)
        while len(flying := self._reductions.in_flight) >= self._depth:
            self._reductions.settle(flying[0])
        self._start(waiting.parts)

    def abort(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
