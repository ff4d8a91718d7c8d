"""How much of the optimizer's states the device has room for next to everything else.

    until the schedule stays    all states live in host memory
    the next two whole steps    their peak is measured
    then                        states move to the device, bucket by bucket, until they and the peak fill the budget
    later                       states move back if a step has gone over the budget; a new schedule begins this again

No collective depends on where states live, so each rank decides for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zeroweave.optim.state_offload import StateOffload

_MEASURED: Final = 2


class Adaptive:
    """Moves states between the memories. `memory_budget`: bytes of the device.

    `peak()`: most bytes of the device that were in use at once since `restart()`; always 0 without a count, and the
    budget is then for the states alone.
    """

    def __init__(
        self, offload: StateOffload, memory_budget: int, peak: Callable[[], int], restart: Callable[[], None]
    ) -> None:
        self._offload, self._memory_budget = offload, memory_budget
        self._peak, self._restart = peak, restart
        self._steps = -1
        """whole steps since the schedule stays; -1: it does not"""

    def step_ended(self, settled: bool) -> None:
        """After each optimizer step. `settled`: the steps follow a schedule that will not change by itself."""
        self._steps = self._steps + 1 if settled else -1
        if self._steps == 0:  # what came before belongs to another schedule, or to setting up
            self._restart()
            return
        here = self._offload.on_host(False)
        room = self._memory_budget - (self._peak() or sum(map(self._offload.nbytes, here)))
        if room < 0:
            self._move(here, -room, on_host=True)
        elif self._steps == _MEASURED:
            self._move(self._offload.on_host(), room, on_host=False)

    def _move(self, buckets: tuple[int, ...], nbytes: int, on_host: bool) -> None:
        """Moves so many bytes: at least, to the host; at most, to the device."""
        for bucket in buckets:
            size = self._offload.nbytes(bucket)
            if nbytes > 0 and (on_host or size <= nbytes):
                self._offload.move(bucket, on_host)
                nbytes -= size
        self._restart()
