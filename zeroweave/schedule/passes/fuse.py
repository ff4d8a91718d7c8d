"""Fuse: the gathers of neighbouring small buckets are issued in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Fuse, Instruction, Reshard, Run, Unshard, Update
from zeroweave.schedule.passes.room import within

SMALL: Final = 1 << 20
"""Bytes up to which a bucket is small where nothing was measured."""
SHARE: Final = 16
"""What is pulled up in one launch is at most this part of the largest bucket."""


def fuse(schedule: Schedule) -> Schedule:
    """Pull the gather of a small bucket up to the gather before it, and put a ``Fuse`` in front of both.

    Before:  Unshard 0 · Wait 0 · Run 0 · Unshard 1 · Wait 1 · Run 1
    After:   Fuse 2 · Unshard 0 · Unshard 1 · Wait 0 · Run 0 · Wait 1 · Run 1

    A bucket is small where starting its gather takes longer than moving its bytes. All that is pulled up in one
    launch is small together, and against the largest bucket, so that it hardly counts as memory. Never above a
    bucket's previous ``Reshard``, an ``Update``, or out of the forward or backward that needs it. Only where
    ``facts.fuse``.
    """
    if not schedule.facts.fuse:
        return schedule
    small = _small(schedule)
    sizes = {bucket.id: bucket.nbytes for bucket in schedule.facts.buckets}
    instructions = schedule.instructions
    launches: dict[int, list[int]] = {}  # index of the first gather -> all of its launch
    holds: dict[int, int] = {}
    lead: int | None = None
    room, since = 0, set[int]()  # bytes that may still join; buckets dropped since the launch
    phase = None
    for index, instruction in enumerate(instructions):
        match instruction:
            case Run(call, _) if call.phase != phase:
                phase, lead = call.phase, None
            case Update():
                lead = None
            case Reshard(bucket):
                holds[bucket] = holds.get(bucket, 0) - 1
                since.add(bucket)
            case Unshard(bucket):
                holds[bucket] = holds.get(bucket, 0) + 1
                if holds[bucket] > 1:
                    continue
                if lead is not None and bucket not in since and sizes[bucket] <= room:
                    launches[lead].append(index)
                    room -= sizes[bucket]
                else:
                    lead, room, since = index, small, set()
                    launches[lead] = [index]
    together = {first: rest for first, rest in launches.items() if len(rest) > 1}
    if not together:
        return schedule
    pulled = {index for rest in together.values() for index in rest}
    out: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        if index in together:
            out += [Fuse(len(together[index])), *(instructions[each] for each in together[index])]
        elif index not in pulled:
            out.append(instruction)
    return within(schedule, replace(schedule, instructions=tuple(out)))


def _small(schedule: Schedule) -> int:
    costs = schedule.costs
    small = SMALL if costs is None or costs.gather.beta <= 0 else int(costs.gather.alpha / costs.gather.beta)
    return min(small, max((bucket.nbytes for bucket in schedule.facts.buckets), default=0) // SHARE)
