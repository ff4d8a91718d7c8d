"""Budget: how much device memory schedules may fill where nobody has said it.

    room                what PyTorch has, and what is free beside it
    - margin            for what nobody foresees
    - reserve           for batches that grow
    - beside            model state, and all else that is there and no pass can change
    - a graph's own     where steps run as CUDA graphs, what they have a second time
    = flats, reductions in flight, activations

Places in which copy engines gather have the bytes of the flats that lie there at once. While fewer do, nobody else has
what is left: activations that need most at such a time are what the reserve has room for, which is no less than they.
All of it follows from costs that the ranks have agreed on, so that all have the same budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import simulate
from zeroweave.schedule.facts import Costs

MARGIN: Final = 0.05
"""Of the room: what lies unused between blocks, and what other programs on the device may take later."""


def margin(costs: Costs) -> int:
    """Bytes that are to be free while a step needs most."""
    return int(costs.room * MARGIN)


def reserve(costs: Costs) -> int:
    """Bytes that steps may grow by until the margin is touched: activations may double. At least the margin."""
    return max(margin(costs), *costs.activations, 0)


def fixed(costs: Costs) -> int:
    """Bytes that are in use at most and belong to no flat: the same by any schedule."""
    return costs.beside + max(costs.activations, default=0)


def foreseen(costs: Costs, schedule: Schedule) -> int:
    """Bytes that will be in use at most with `schedule`."""
    return costs.beside + simulate(schedule, costs).peak


def budget(costs: Costs, measured: Schedule, graphs: bool) -> int | None:
    """Bytes of flats, reductions in flight and activations that "auto" may reach; None for no budget.

    None where nobody counts, and where there is not the room that "auto" takes without a budget: a bucket more than
    `measured`, which the costs are of, needs. `graphs`: steps run as CUDA graphs, whose memory nobody else can use; a
    step that runs as ever takes as much again.
    """
    if not costs.room:
        return None
    fills = costs.room - margin(costs) - reserve(costs) - costs.beside
    if graphs:
        fills = max(fills // 2, fills - own_of_graphs(costs, measured))
    largest = max(measured.facts.sizes.values(), default=0)
    return fills if fills >= costs.filled + largest else None


def own_of_graphs(costs: Costs, measured: Schedule) -> int:
    """Bytes that a graph has of its own at most, whatever stays gathered: all but flats in places, which all share."""
    facts = measured.facts
    return costs.filled + sum(nbytes for bucket, nbytes in facts.sizes.items() if bucket not in facts.placed)


def grown(costs: Costs, schedule: Schedule, peak: int, room: int) -> Costs:
    """Costs that foresee what has come: `peak` bytes were in use at most with `schedule`, and `room` is left now.

    The budget that follows is smaller by the reserve at least: so it changes a few times at most, never back.
    """
    more = max(peak - foreseen(costs, schedule), reserve(costs))
    return replace(costs.higher(more), room=min(costs.room, room))
