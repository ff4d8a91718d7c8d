"""Headroom: where the device has no memory left while steps grow, the ranks fill less of it together.

Nothing here is an error, and nothing depends on when garbage is collected: what counts is the most that was in use at
once in a window that trains, from its first call until the ranks agree on its step, and how often the device had
nothing left meanwhile. What happens between windows or is only tried out tells nothing about steps.
"""

from __future__ import annotations

import torch

from zeroweave.comm.wrappers import Wire
from zeroweave.engine.agreements import Agreements
from zeroweave.ranks.control import Control
from zeroweave.ranks.process import machine
from zeroweave.schedule import Costs, Schedule, fixed, grown, margin

SHORT = "memory is short"
"""What a rank notes."""


class Headroom:
    """Of one rank. `sharing`: so many ranks compute on its device, and each counts its share of what is free."""

    def __init__(self, wire: Wire, agreements: Agreements, sharing: int) -> None:
        self._wire, self._agreements, self._sharing = wire, agreements, sharing
        self._limit: int | None = None
        """bytes above which memory is short; None: no limit"""
        self._refusals: int | None = None
        """those before the open window; None: it tells nothing"""
        self._peak = 0
        """bytes in use at most in the last window; 0 where that is not known, as it was no more than before"""
        self._had = 0
        """the largest peak of windows when costs were last changed: below it memory is never short"""
        self._fixed = 0
        """bytes that no schedule can change, as found where memory was short; the same on all ranks"""

    def room(self) -> int:
        """Bytes that may be in use at most; 0 where they are not counted."""
        return self._wire.clock.room(self._sharing)

    def foresee(self, costs: Costs) -> Costs:
        """Costs that were agreed on, with as much outside flats as there was when memory was short: it may come again.

        When they were measured, some of it may have been there.
        """
        return costs.higher(max(0, self._fixed - fixed(costs))) if self._fixed else costs

    def watch(self, costs: Costs | None) -> None:
        """The next window follows a schedule that was made with a budget by these costs; None: without a budget."""
        self._limit = None if costs is None else max(costs.room - margin(costs), self._had)

    def found_out(self) -> None:
        """The costs that schedules are made by are others from now on; what the last window has had was there."""
        self._had = max(self._had, self._peak)

    def begin(self) -> None:
        """A window begins with its first call."""
        self._refusals = None
        if self._limit is not None and not self._wire.skips:
            _, self._refusals = self._wire.clock.strain()  # up to here

    def abort(self) -> None:
        """The open window is no step, and tells nothing: what happens until another one begins belongs to none."""
        self._refusals, self._peak = None, 0

    def look(self) -> None:
        """Notes where memory is short. Before the ranks agree on a step; local."""
        refusals, self._refusals, self._peak = self._refusals, None, 0
        if refusals is None or self._limit is None:
            return
        self._peak, now = self._wire.clock.strain()
        if self._peak > self._limit or now > refusals:
            self._agreements.notes.note(SHORT)

    def is_short(self) -> bool:
        """True if all ranks know that memory is short on one of them. True once for each time."""
        return bool(self._agreements.notes.take((SHORT,)))

    def agree(self, costs: Costs, schedule: Schedule) -> Costs:
        """What foresees the need of the last window, for all ranks; see `schedule.budget.grown`. Collective."""
        peak, room = self._agreements.memory(self._peak, self.room())
        found = grown(costs, schedule, peak, room)
        self._fixed = max(self._fixed, fixed(found))
        return found


def ranks_beside(control: Control, device: torch.device) -> int:
    """How many ranks compute on this one's GPU; 1 on a CPU, where memory is not counted. Collective."""
    if device.type != "cuda":
        return 1
    mine = machine(), str(torch.cuda.get_device_properties(device).uuid)
    return control.all_gather_object(mine, "which ranks share a GPU").count(mine)
