"""Settle: a reduction that is over frees its flat early."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import simulate
from zeroweave.schedule.instructions import Instruction, Settle, Update


def settle(schedule: Schedule) -> Schedule:
    """Move each ``Settle`` up to the first event that begins after its reduction is predicted to be over.

    Before:  Reduce 2 · Run 1 · Reduce 1 · Run 0 · Settle 2 · Reduce 0
    After:   Reduce 2 · Run 1 · Settle 2 · Reduce 1 · Run 0 · Reduce 0

    ``depth`` stays the most reductions in flight: a Settle only moves up, where the compute stream does not wait
    for it, and the gradient flat is free earlier. Changes nothing without measured costs.
    """
    costs = schedule.costs
    if costs is None:
        return schedule
    prediction = simulate(schedule, costs)
    events = [span.index for span in prediction.spans if span.lane == "compute"]
    begins = [span.start for span in prediction.spans if span.lane == "compute"]
    instructions = schedule.instructions
    moved: dict[int, list[Instruction]] = {}
    taken: set[int] = set()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Settle() if (reduction := schedule.producers[index]) in prediction.over:
                # Both indices and times go up, and the event of a reduction begins before it is over.
                found = bisect_left(begins, prediction.over[reduction], lo=bisect_right(events, reduction))
                event = events[found] if found < len(events) else index
                if event < index and not isinstance(instructions[event], Update):
                    moved.setdefault(event, []).append(instruction)
                    taken.add(index)
    return schedule.rearranged(moved, taken)
