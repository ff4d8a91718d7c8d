"""Offload: what a forward has saved waits for its backward in host memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Instruction, Offload, Release, Reload, Run, is_event


def offload(schedule: Schedule) -> Schedule:
    """Move what each forward call has saved out of device memory, and back ahead of the backward that needs it.

    Before:  Run 0 · Run 1 · Run 2 · Run 2 backward · Run 1 backward · Run 0 backward
    After:   Run 0 · Offload 0 · Run 1 · Release 0 · Run 2 · Run 2 backward · Reload 0 · Run 1 backward · Run 0 backward

    Each copy runs concurrently with one call. More calls would hide more of a slow copy, and hold the memory of more
    calls: this pass is to save memory. What would come back before another call has run without it stays: that of the
    last two calls, whose backwards follow soon. Only where ``facts.offload``.
    """
    instructions = schedule.instructions
    if not schedule.facts.offload or any(isinstance(i, Offload) for i in instructions):
        return schedule
    ends = dict(schedule.calls.values())  # of each Run, by index: where its call ends
    runs = list(ends)
    before = [0, *accumulate(map(is_event, instructions))]  # events before each instruction
    begins = [before[run] for run in runs]
    uses = [set(each.uses) for each in instructions if isinstance(each, Run)]
    inserted: dict[int, list[Instruction]] = {}
    for (call, number), move in schedule.moves.items():
        run, end = schedule.calls[call, number]
        leave = bisect_right(runs, end)  # this and the others: numbers of Runs
        back = bisect_left(begins, move.until) - 1
        inside = move.inside or move.until <= before[ends[runs[back]]]
        if inside and uses[back] & uses[runs.index(run)]:
            back -= 1  # that call needs it: of eager code, which asks in the middle
        if leave + 1 < back:
            for at, kind in ((leave, Offload), (leave + 1, Release), (back, Reload)):
                inserted.setdefault(schedule.slot(runs[at]), []).append(kind(call, number))
    for moves in inserted.values():
        # what waits for nothing comes first, and memory is freed before the next copy takes some
        moves.sort(key=lambda each: (Reload, Release, Offload).index(type(each)))
    return schedule.rearranged(inserted)
