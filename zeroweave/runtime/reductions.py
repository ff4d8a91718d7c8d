"""Reductions in flight: from the moment they are issued until their results are used.

    start    the parts are laid out in a gradient flat, if they are not in one, and the collective is issued
    settle   the current stream waits for the result, which goes where `then` puts it

Flats that are laid out here, and results, exist from start to settle only, so that none is left when the optimizer
allocates. In a group of one rank, the result is in the memory of the parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport


class _Flight(NamedTuple):
    key: int
    pending: Pending
    out: torch.Tensor
    then: Callable[[torch.Tensor], None]
    nbytes: int


class Reductions:
    """Reductions in flight, oldest first. `flats` counts the bytes of their flats.

    `op` and `dtype` (None: that of the gradients) are those of every reduction.
    """

    def __init__(self, transport: Transport, op: ReduceOp, dtype: torch.dtype | None, flats: Gauge) -> None:
        self._transport, self._op, self.dtype = transport, op, dtype
        self._flights: deque[_Flight] = deque()
        self._flats = flats

    def start(
        self,
        key: int,
        parts: Parts,
        layout: Spread,
        like: torch.Tensor,
        then: Callable[[torch.Tensor], None],
        whole: bool = False,
        out: torch.Tensor | None = None,
    ) -> None:
        """Issues the reduction of `parts`; `then(result)` runs when it is settled.

        The result is this rank's chunk, or the whole flat if `whole`. `like` gives the device, and the dtype
        if no other is set. `out`, if given, takes the result.
        """
        dtype = self.dtype or like.dtype
        numel = layout.numel if whole else layout.chunks[layout.group_rank(self._transport.rank)]
        if out is None and isinstance(parts, torch.Tensor) and parts.dtype == dtype and len(parts) == numel:
            out = parts  # of a group of one rank
        elif out is None:
            out = torch.empty(numel, dtype=dtype, device=like.device)
        reduce = self._transport.all_reduce if whole else self._transport.reduce_scatter
        flight = _Flight(key, reduce(out, parts, layout, self._op), out, then, layout.numel * dtype.itemsize)
        self._flats.add(flight.nbytes)
        self._flights.append(flight)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The keys of the reductions that are not settled, oldest first."""
        return tuple(flight.key for flight in self._flights)

    def settle(self, key: int) -> None:
        """Makes the oldest reduction of `key` usable; does nothing if it has been settled."""
        flight = next((f for f in self._flights if f.key == key), None)
        if flight is not None:
            self._flights.remove(flight)
            self._land(flight)
            flight.then(flight.out)

    def settle_all(self) -> None:
        """Makes every reduction usable, in the order in which they were issued."""
        while self._flights:
            self.settle(self._flights[0].key)

    def abort(self) -> None:
        """Waits for reductions under way and forgets their results."""
        while self._flights:
            self._land(self._flights.popleft())

    def _land(self, flight: _Flight) -> None:
        flight.pending.wait()
        self._flats.add(-flight.nbytes)
