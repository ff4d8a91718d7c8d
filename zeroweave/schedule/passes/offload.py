"""Offload: what a forward has saved waits for its backward in host memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import is_event
from zeroweave.schedule.instructions import Call, Instruction, Offload, Release, Reload, Run


def offload(schedule: Schedule) -> Schedule:
    """Move what each forward call has saved out of device memory, and back ahead of the backward that needs it.

    Before:  Run 0 · Run 1 · Run 2 · Run 2 backward · Run 1 backward · Run 0 backward
    After:   Run 0 · Offload 0 · Run 1 · Release 0 · Run 2 · Run 2 backward · Reload 0 · Run 1 backward · Run 0 backward

    Each copy runs concurrently with one call. More calls would hide more of a slow copy, and hold the memory of more
    calls: this pass is to save memory. What would come back before another call has run without it stays: that of the
    last two calls, whose backwards follow soon. Only where ``facts.offload``.
    """
    if not schedule.facts.offload or any(isinstance(i, Offload) for i in schedule.instructions):
        return schedule
    runs = _Runs(schedule)
    inserted: dict[int, list[Instruction]] = {}
    for (call, number), move in schedule.moves.items():
        leave = runs.after[call, number]  # numbers of Runs
        back = bisect_left(runs.events, move.until) - 1
        inside = move.inside or move.until < runs.over[back]
        if inside and runs.uses[back] & runs.buckets[call]:
            back -= 1  # that call needs it: of eager code, which asks in the middle
        if leave + 1 < back:
            for run, kind in ((leave, Offload), (leave + 1, Release), (back, Reload)):
                inserted.setdefault(runs.slots[run], []).append(kind(call, number))
    for moves in inserted.values():
        # what waits for nothing comes first, and memory is freed before the next copy takes some
        moves.sort(key=lambda each: (Reload, Release, Offload).index(type(each)))
    return schedule.rearranged(inserted)


class _Runs:
    """The Runs of a schedule, numbered from 0.

    slots[r]: index before Run r and what prepares it. events[r]: how many events come before Run r, over[r]: up to
    its call's end. uses[r]: its buckets, buckets[call]: those of a call. after[call, number]: the first Run after the
    end of that call.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.slots: list[int] = []
        self.events: list[int] = []
        self.over: list[int] = []
        self.uses: list[set[int]] = []
        self.buckets: dict[Call, set[int]] = {}
        self.after: dict[tuple[Call, int], int] = {}
        runs = [index for index, _ in schedule.calls.values()]
        events = [0, *accumulate(map(is_event, schedule.instructions))]  # before each instruction
        for (call, number), (index, end) in schedule.calls.items():
            run = schedule.instructions[index]
            assert isinstance(run, Run)
            self.slots.append(schedule.slot(index))
            self.events.append(events[index])
            self.over.append(events[end] + 1)
            self.uses.append(set(run.uses))
            self.buckets.setdefault(call, set()).update(run.uses)
            self.after[call, number] = bisect_right(runs, end)
