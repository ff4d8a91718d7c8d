"""Room: how much memory a schedule's events leave, for passes that trade memory for time."""

from __future__ import annotations

from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import Prediction, most_by_event, simulate
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import is_event
from zeroweave.schedule.passes.settle import settle

TAX: Final = 0.5
"""Seconds that computation is slower for each second of a hidden collective: 0.4 to 0.6 on two H200 with NCCL."""
COPY_TAX: Final = 0.1
"""The same of a gather by copy engine: 0.05 to 0.12 there."""


class Events:
    """The events of a schedule, numbered from 0: where they stand and how much memory is in use while each lasts.

    ``slots[e]``: index before event e and what prepares it. ``before[i]``: how many events come before
    instruction i. ``memory[e]``: bytes while event e is the last, reductions settled as soon as they
    are over; a pass adds what it takes.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.slots: list[int] = []
        self.before: list[int] = []
        settled = settle(schedule)
        self.memory = most_by_event(settled, simulate(settled, costs).memory)
        for index, instruction in enumerate(schedule.instructions):
            self.before.append(len(self.slots))
            if is_event(instruction):
                self.slots.append(schedule.slot(index))

    def fits(self, nbytes: int, start: int, stop: int, limit: int) -> bool:
        """True if there is room for ``nbytes`` more during the events from start up to stop."""
        return all(self.memory[e] + nbytes <= limit for e in range(start, stop))

    def take(self, nbytes: int, start: int, stop: int) -> None:
        """Takes that room."""
        for event in range(start, stop):
            self.memory[event] += nbytes


def predict(schedule: Schedule, costs: Costs) -> Prediction:
    """What a schedule will cost when its reductions are settled as soon as they are over."""
    return simulate(settle(schedule), costs)


def price(prediction: Prediction) -> float:
    """The step's seconds, and what collectives cost that no call waits for."""
    kernels = prediction.busy("all_gather", "reduce_scatter") - prediction.copied
    return prediction.seconds + TAX * kernels + COPY_TAX * prediction.copied


def within(before: Schedule, after: Schedule) -> Schedule:
    """``after``, or ``before`` where only that stays within ``facts.memory``.

    Even what moves no flat may cost memory: where less is waited for, reductions are over later in the record.
    """
    costs, most = before.costs, before.facts.memory
    if after is before or costs is None or most is None:
        return after
    peak = predict(after, costs).peak
    return after if peak <= most or peak <= predict(before, costs).peak else before
