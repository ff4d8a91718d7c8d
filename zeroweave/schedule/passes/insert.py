"""Insert: a bucket whose next use follows at once stays where it is."""

from __future__ import annotations

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Reshard, Run, Unshard, Wait
from zeroweave.schedule.passes.room import within


def insert(schedule: Schedule) -> Schedule:
    """Drop ``Reshard b … Unshard b · Wait b`` where no call on other buckets is between them.

    Before:  Run head forward · Reshard head · Unshard head · Wait head · Run head backward · Reshard head
    After:   Run head forward · Run head backward · Reshard head

    The same for calls on one bucket that follow each other: a block run in pieces, a layer called several
    times. Calls that use no bucket do not count. Holds are counts: the hold that ``Reshard b`` would have dropped
    becomes the one that ``Unshard b`` would have taken. Changes nothing where only that stays within
    ``facts.memory``.
    """
    dropped: set[int] = set()
    candidates: dict[int, list[int]] = {}  # bucket -> its Reshards since the last call on other buckets only
    waits: dict[int, int] = {}  # bucket -> how many of its next Waits belong to dropped Unshards
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Reshard(bucket):
                candidates.setdefault(bucket, []).append(index)
            case Unshard(bucket) if candidates.get(bucket):
                dropped |= {candidates[bucket].pop(), index}
                waits[bucket] = waits.get(bucket, 0) + 1
            case Wait(bucket) if waits.get(bucket):
                dropped.add(index)
                waits[bucket] -= 1
            case Run(_, uses) if uses:
                candidates = {bucket: candidates[bucket] for bucket in uses if bucket in candidates}
    return within(schedule, schedule.rearranged({}, dropped))
