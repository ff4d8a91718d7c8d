"""Keep: some buckets stay gathered from one use to the next."""

from __future__ import annotations

from collections.abc import Iterable

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import simulate
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Reshard, Unshard, Wait
from zeroweave.schedule.passes.prefetch import limit, prefetch
from zeroweave.schedule.passes.room import Events, predict, price


def keep(schedule: Schedule) -> Schedule:
    """Drop ``Reshard b … Unshard b · Wait b`` for every bucket of ``facts.keep``, whatever lies between.

    Before:  Run 0 · Reshard 0 · Unshard 1 · Wait 1 · Run 1 · … · Unshard 0 · Wait 0 · Run 0 backward · Reshard 0
    After:   Run 0 · Unshard 1 · Wait 1 · Run 1 · … · Run 0 backward · Reshard 0

    Such a bucket is gathered once in the window, however many micro-steps that has. "auto" fills the memory that
    ``facts.memory`` and prefetch leave, first with the buckets whose gathers expose most time per byte, then with
    those that save most time of the collectives' lane per byte and are needed again soonest; without measured
    costs it keeps none.
    """
    wanted, costs = schedule.facts.keep, schedule.costs
    if wanted != "auto":
        return _without_gaps(schedule, wanted)
    if costs is None:
        return schedule
    most, ahead = limit(schedule, costs), prefetch(schedule)
    chosen = _choose(ahead, costs, most)
    while chosen:
        kept = _without_gaps(schedule, frozenset(chosen))
        prediction = predict(prefetch(kept), costs)
        if prediction.peak <= most:  # it may be over: where less is waited for, reductions are over later
            # Memory that is kept is not there to gather ahead.
            return kept if price(prediction) <= price(predict(ahead, costs)) else schedule
        chosen = chosen[: len(chosen) * 3 // 4]
    return schedule


def _without_gaps(schedule: Schedule, buckets: frozenset[int]) -> Schedule:
    dropped = {index for bucket, gaps in _gaps(schedule).items() if bucket in buckets for gap in gaps for index in gap}
    return schedule.rearranged({}, dropped)


def _gaps(schedule: Schedule) -> dict[int, list[tuple[int, int, int]]]:
    """For each bucket: (Reshard, Unshard, Wait) by index, wherever it is dropped and gathered again later."""
    dropped: dict[int, int] = {}
    gathered: dict[int, tuple[int, int]] = {}
    gaps: dict[int, list[tuple[int, int, int]]] = {}
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Reshard(bucket) if index in schedule.drops:
                dropped[bucket] = index
            case Unshard(bucket) if index in schedule.gathers and bucket in dropped:
                gathered[bucket] = (dropped.pop(bucket), index)
            case Wait(bucket) if bucket in gathered:
                gaps.setdefault(bucket, []).append((*gathered.pop(bucket), index))
    return gaps


def _choose(schedule: Schedule, costs: Costs, most: int) -> list[int]:
    """The buckets to keep, those first that save most."""
    facts = schedule.facts
    gaps, events = _gaps(schedule), Events(schedule, costs)
    exposed: dict[int, float] = {}
    for index, seconds in simulate(schedule, costs).waits.items():
        if isinstance(instruction := schedule.instructions[index], Wait):
            exposed[instruction.bucket] = exposed.get(instruction.bucket, 0.0) + seconds

    def stretches(bucket: int) -> Iterable[tuple[int, int]]:
        return ((max(0, events.before[start] - 1), events.before[stop]) for start, stop, _ in gaps[bucket])

    def worth(bucket: int) -> tuple[float, float, int, int]:
        nbytes = max(1, facts.by_id[bucket].nbytes)
        saved = len(gaps[bucket]) * costs.seconds("all_gather", bucket, nbytes)
        length = sum(stop - start for start, stop in stretches(bucket))
        return -exposed.get(bucket, 0.0) / nbytes, -saved / nbytes, length, bucket

    chosen = []
    for bucket in sorted(gaps, key=worth):
        nbytes = facts.by_id[bucket].nbytes
        if all(events.fits(nbytes, start, stop, most) for start, stop in stretches(bucket)):
            for start, stop in stretches(bucket):
                events.take(nbytes, start, stop)
            chosen.append(bucket)
    return chosen
