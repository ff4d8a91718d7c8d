"""Free and stage: what has to be done with memory before the first update."""

from __future__ import annotations

from itertools import takewhile

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Free, Instruction, Run, Stage, Update


def free(schedule: Schedule) -> Schedule:
    """Put a ``Free`` before the first ``Update``, where ``facts.free`` asks for it.

    Before:  Settle head · Update head · Update blocks.0 …
    After:   Settle head · Free · Update head · Update blocks.0 …

    A backward uses up what its forward saved for it. What is left then belongs to graphs that were retained or
    never walked, and from the first update on they can give no gradient any more: their parameters change.
    """
    if not schedule.facts.free or Free() in schedule.instructions:
        return schedule
    first = next((n for n, i in enumerate(schedule.instructions) if isinstance(i, Update)), None)
    return schedule if first is None else schedule.rearranged({first: [Free()]})


def stage(schedule: Schedule) -> Schedule:
    """Put a ``Stage`` of each bucket before calls, where ``facts.stage`` asks for it.

    Before:  Run 0 · Run 1 · Run 1 backward · Run 0 backward · Settle 1 · Update 1 · Settle 0 · Update 0
    After:   Stage 1 · Run 0 · Stage 0 · Run 1 · Run 1 backward · Run 0 backward · Settle 1 · Update 1 …

    The bucket that is updated first comes first. They are spread evenly over the calls of the first forward. So
    the copies, which run concurrently with the computation, are over before the first update, and do not all at once
    delay what else moves between the device and host memory.
    """
    if not schedule.facts.stage or any(isinstance(i, Stage) for i in schedule.instructions):
        return schedule
    updates = [i.bucket for i in schedule.instructions if isinstance(i, Update)]
    order = list(dict.fromkeys([*updates, *schedule.facts.by_id]))
    runs = [(n, i.call.phase) for n, i in enumerate(schedule.instructions) if isinstance(i, Run)]
    calls = [index for index, _ in takewhile(lambda run: run[1] == "forward", runs)]
    moved: dict[int, list[Instruction]] = {}
    for number, bucket in enumerate(order):
        index = schedule.slot(calls[number * len(calls) // len(order)]) if calls else 0
        moved.setdefault(index, []).append(Stage(bucket))
    return schedule.rearranged(moved)
