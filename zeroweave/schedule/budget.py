"""Budget: how much device memory schedules may fill where the config does not say.

    room                what PyTorch has, and what else is free
    - margin            for what is not foreseen
    - reserve           for batches that grow
    - resident          model state, and everything else that no pass can change
    = flats, reductions in flight, activations

Passes see what these take together. The device has more: registered buffers are always there,
and graphs have their own memory. So what a schedule takes of the device is checked when it is made, and where that
is too much, it is made again for less.

All of it follows from costs that the ranks have agreed on, so that all have the same budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import gathered_of, simulate
from zeroweave.schedule.facts import Costs

MARGIN: Final = 0.05
"""Of the room: what is unused between blocks, and what other programs on the device may take later."""


def margin(costs: Costs) -> int:
    """Bytes that are to be free while a step needs most."""
    return int(costs.room * MARGIN)


def reserve(costs: Costs) -> int:
    """Bytes that steps may grow by until the margin is touched: activations may double. At least the margin."""
    return max(margin(costs), *costs.activations, 0)


def fixed(costs: Costs) -> int:
    """Bytes that are in use at most and belong to no flat: the same by any schedule."""
    return costs.resident + max(costs.activations, default=0)


def foreseen(costs: Costs, schedule: Schedule) -> int:
    """Bytes that will be in use at most with `schedule`."""
    return costs.resident + simulate(schedule, costs).peak


def budget(costs: Costs, measured: Schedule) -> int | None:
    """Bytes of flats, reductions in flight and activations that "auto" may reach; None for no budget.

    None where memory is not counted. None, too, if the budget would be smaller than what "auto" uses without one: the
    memory of `measured`, the schedule whose costs these are, and one bucket more. See `lowered` for what such a budget
    leaves out.
    """
    if not costs.room:
        return None
    return _no_less(_free(costs), costs, measured)


def lowered(memory: int, schedule: Schedule, costs: Costs, measured: Schedule) -> int | None:
    """What to fill instead of `memory`, which `schedule` was made for: the same where the device has room for that
    schedule, else less, as by `budget`.
    """
    over = taken(schedule, costs) - _free(costs)
    return memory if over <= 0 else _no_less(memory - max(over, memory // 8), costs, measured)


def taken(schedule: Schedule, costs: Costs) -> int:
    """Bytes that the device is to have for all that schedules decide about.

    A step without a schedule gathers in no registered buffer, and takes what measured steps took.
    """
    shared = gathered_of(schedule, schedule.registered_buffers.keys() | schedule.stays)
    memory = simulate(schedule, costs).memory
    rest = max((used - flats for used, flats in zip(memory, shared, strict=True)), default=0)
    stays = sum(schedule.facts.sizes[bucket] for bucket in schedule.stays - schedule.registered_buffers.keys())
    return sum(schedule.registered_sizes.values()) + stays + max(rest, costs.filled)


def _free(costs: Costs) -> int:
    """Bytes for all that schedules decide about."""
    return costs.room - margin(costs) - reserve(costs) - costs.resident


def _no_less(fills: int, costs: Costs, measured: Schedule) -> int | None:
    """None where that is not even a bucket more than was filled when it was measured."""
    largest = max(measured.facts.sizes.values(), default=0)
    return fills if fills >= costs.filled + largest else None


def grown(costs: Costs, schedule: Schedule, peak: int, room: int) -> Costs:
    """Costs that predict what was measured: `peak` bytes in use at most with `schedule`, and `room` left now.

    The budget that follows is smaller by at least the reserve. So it changes a few times at most, and never back.
    """
    more = max(peak - foreseen(costs, schedule), reserve(costs))
    return replace(costs.higher(more), room=min(costs.room, room))
