"""Prefetch: gathers are issued some calls before the call that needs them."""

from __future__ import annotations

from dataclasses import replace

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Instruction, Phase, Reshard, Run, Unshard, Update, Wait


def prefetch(schedule: Schedule) -> Schedule:
    """Move each ``Unshard`` that starts a gather ``facts.prefetch`` calls ahead, in front of its ``Wait``.

    Before:  Unshard 0 · Wait 0 · Run 0 · Reshard 0 · Unshard 1 · Wait 1 · Run 1 · Reshard 1 · Unshard 2 · …
    After:   Unshard 0 · Unshard 1 · Wait 0 · Run 0 · Reshard 0 · Unshard 2 · Wait 1 · Run 1 · Reshard 1 · …

    Calls that follow each other in one phase on the same buckets count as one stretch, together with calls
    between and after them that use no bucket: an eager block of twenty modules is fetched while the block
    before it runs, not while its last module does. The turn from forward to backward begins a new stretch
    even on one bucket.

    Never above the same bucket's previous ``Reshard``, an ``Update``, or the start of the step. The gather is
    issued after everything before the call has been dropped. So while a call of stretch s runs, no more is
    unsharded (beside kept buckets) than open calls and the stretches s … s + prefetch use, and a call without
    buckets adds nothing: 1 + prefetch buckets where calls use one bucket each and do not nest. Prefetch 0
    changes nothing, nor does a second application.
    """
    ahead = schedule.facts.prefetch
    instructions = schedule.instructions
    stretches = _Stretches(instructions)
    if not ahead or not stretches.slots:
        return schedule

    next_use = _next_use(instructions, stretches)
    moved: dict[int, list[Instruction]] = {}  # index -> Unshards to issue in front of it
    taken: set[int] = set()
    holds: dict[int, int] = {}
    floor: dict[int, int] = {}  # bucket -> first Run after its last Reshard: it cannot be gathered before
    barrier = run = 0  # the first Run after the last Update; the Run to come
    for index, instruction in enumerate(instructions):
        match instruction:
            case Run():
                run += 1
            case Update():
                barrier = run
            case Reshard(bucket):
                holds[bucket] = holds.get(bucket, 0) - 1
                floor[bucket] = run
            case Unshard(bucket):
                holds[bucket] = holds.get(bucket, 0) + 1
                if holds[bucket] > 1:
                    continue  # gathers nothing
                stretch = max(0, next_use[index] - ahead)
                target = max(stretches.first[stretch], floor.get(bucket, 0), barrier)
                if target < run or (target == run and run < len(stretches.slots) and stretches.slots[run] < index):
                    moved.setdefault(stretches.slots[target], []).append(instruction)
                    taken.add(index)
    if not taken:
        return schedule
    out: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        out.extend(moved.get(index, ()))
        if index not in taken:
            out.append(instruction)
    return replace(schedule, instructions=tuple(out))


class _Stretches:
    """The Runs of a schedule, numbered from 0, and the stretches they form.

    slots[r]: index in front of Run r and the Waits directly before it. of[r]: Run r's stretch. first[s]: the
    first Run of stretch s.
    """

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.slots: list[int] = []
        self.of: list[int] = []
        self.first: list[int] = [0]
        last: tuple[frozenset[int], Phase] | None = None
        for index, instruction in enumerate(instructions):
            if not isinstance(instruction, Run):
                continue
            if instruction.uses:
                key = (frozenset(instruction.uses), instruction.call.phase)
                if last is not None and key != last:
                    self.first.append(len(self.slots))
                last = key
            self.of.append(len(self.first) - 1)
            while index and isinstance(instructions[index - 1], Wait):
                index -= 1
            self.slots.append(index)


def _next_use(instructions: tuple[Instruction, ...], stretches: _Stretches) -> dict[int, int]:
    """For each Unshard, by index: the stretch of the next Run on its bucket, or if none, of the next Run."""
    result: dict[int, int] = {}
    nearest = len(stretches.first)  # the stretch after the last
    use: dict[int, int] = {}
    run = len(stretches.of)
    for index in range(len(instructions) - 1, -1, -1):
        instruction = instructions[index]
        if isinstance(instruction, Run):
            run -= 1
            nearest = stretches.of[run]
            use.update((bucket, nearest) for bucket in instruction.uses)
        elif isinstance(instruction, Unshard):
            result[index] = use.get(instruction.bucket, nearest)
    return result
