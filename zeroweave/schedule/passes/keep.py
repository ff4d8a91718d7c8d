"""Insert and keep: buckets stay gathered from one use to the next."""

from __future__ import annotations

from collections.abc import Collection

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import simulate
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Reshard, Run, Unshard, Wait
from zeroweave.schedule.passes.memory_by_event import Events, predict, price, within
from zeroweave.schedule.passes.prefetch import limit, prefetch


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


def keep(schedule: Schedule) -> Schedule:
    """Drop ``Reshard b … Unshard b · Wait b`` for every bucket of ``facts.keep``, with any calls between.

    Before:  Run 0 · Reshard 0 · Unshard 1 · Wait 1 · Run 1 · … · Unshard 0 · Wait 0 · Run 0 backward · Reshard 0
    After:   Run 0 · Unshard 1 · Wait 1 · Run 1 · … · Run 0 backward · Reshard 0

    Such a bucket is gathered once in the window, with any number of micro-steps. One that no update changes loses
    its last ``Reshard`` as well: it stays from one window to the next, and is not gathered again.

    Before:  Run 0 · Reshard 0 · … · Unshard 0 · Wait 0 · Run 0 backward · Reshard 0 · …
    After:   Run 0 · … · Run 0 backward · …

    "auto" fills the memory that ``facts.memory`` and prefetch leave, first with the buckets whose gathers expose most
    time per byte, then with those that save most time of the collectives' lane per byte and are needed again soonest;
    without measured costs it keeps none. A bucket that cannot stay from window to window may stay within one.
    """
    wanted, costs = schedule.facts.keep, schedule.costs
    if wanted != "auto":
        return held(schedule, wanted, wanted)
    if costs is None:
        return schedule
    most, ahead = limit(schedule, costs), prefetch(schedule)
    chosen = _choose(ahead, costs, most)
    while chosen:
        kept = held(schedule, chosen, [bucket for bucket, stays in chosen.items() if stays])
        prediction = predict(prefetch(kept), costs)
        if prediction.peak <= most:  # it may not be: with shorter waits, reductions end later in the step
            # Memory that is kept is not there to gather ahead.
            return kept if price(prediction) <= price(predict(ahead, costs)) else schedule
        chosen = dict(list(chosen.items())[: len(chosen) * 3 // 4])
    return schedule


def held(schedule: Schedule, buckets: Collection[int], stay: Collection[int]) -> Schedule:
    """With ``buckets`` held between their uses, and those of ``stay`` that can, after the last one as well."""
    dropped = {index for bucket, gaps in _gaps(schedule).items() if bucket in buckets for gap in gaps for index in gap}
    dropped |= {last for bucket, (_, _, last) in _ends(schedule).items() if bucket in stay}
    return schedule.rearranged({}, dropped)


def _ends(schedule: Schedule) -> dict[int, tuple[int, int, int]]:
    """For each bucket that could stay and does not: its first Unshard and Wait, and its last drop, by index."""
    first: dict[int, int] = {}
    wait: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Unshard(bucket):
                first.setdefault(bucket, index)
            case Wait(bucket):
                wait.setdefault(bucket, index)
            case Reshard(bucket) if index in schedule.drops and not schedule.facts.by_id[bucket].trainable:
                last[bucket] = index
    return {bucket: (first[bucket], wait[bucket], index) for bucket, index in last.items()}


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


def _choose(schedule: Schedule, costs: Costs, most: int) -> dict[int, bool]:
    """The buckets to keep, those first that save most, and whether each is to stay."""
    facts = schedule.facts
    gaps, ends, events = _gaps(schedule), _ends(schedule), Events(schedule, costs)
    waits = simulate(schedule, costs).waits

    def stretches(bucket: int, stays: bool) -> list[tuple[int, int]]:
        """The events, from one up to another, during which it is held in addition."""
        found = [(max(0, events.before[start] - 1), events.before[stop]) for start, stop, _ in gaps.get(bucket, ())]
        if stays:
            first, _, last = ends[bucket]
            found += [(0, events.before[first]), (max(0, events.before[last] - 1), len(events.memory))]
        return found

    def worth(bucket: int) -> tuple[float, float, int, int]:
        nbytes, stays = max(1, facts.by_id[bucket].nbytes), bucket in ends
        spared = [wait for _, _, wait in gaps.get(bucket, ())] + ([ends[bucket][1]] if stays else [])
        exposed = sum(waits.get(wait, 0.0) for wait in spared)
        saved = len(spared) * costs.seconds("all_gather", bucket, nbytes)
        length = sum(stop - start for start, stop in stretches(bucket, stays))
        return -exposed / nbytes, -saved / nbytes, length, bucket

    chosen: dict[int, bool] = {}
    for bucket in sorted(gaps.keys() | ends.keys(), key=worth):
        nbytes = facts.by_id[bucket].nbytes
        for stays in [each for each, able in ((True, ends), (False, gaps)) if bucket in able]:
            held = stretches(bucket, stays)
            if all(events.fits(nbytes, start, stop, most) for start, stop in held):
                for start, stop in held:
                    events.take(nbytes, start, stop)
                chosen[bucket] = stays
                break
    return chosen
