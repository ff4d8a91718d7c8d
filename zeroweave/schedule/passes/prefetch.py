"""Prefetch: gathers are issued some calls before the call that needs them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Instruction, Phase, Reduce, Reshard, Run, Unshard, Update, Wait, is_event
from zeroweave.schedule.passes.memory_by_event import Events, predict

_MARGIN: Final = 1.25
"""Of a gather's measured time: being late costs more than being early."""
_EQUAL: Final = 1e-3
"""Predictions that differ by less than this share are equal, and the one with the smaller peak is taken."""


def prefetch(schedule: Schedule) -> Schedule:
    """Move each ``Unshard`` that starts a gather ahead of its ``Wait``: some calls, or as many as time asks.

    Before:  Unshard 0 · Wait 0 · Run 0 · Reshard 0 · Unshard 1 · Wait 1 · Run 1 · Reshard 1 · Unshard 2 · …
    After:   Unshard 0 · Unshard 1 · Wait 0 · Run 0 · Reshard 0 · Unshard 2 · Wait 1 · Run 1 · Reshard 1 · …

    ``facts.prefetch`` is a number of calls, or "auto": each gather is then issued as late as its measured time
    allows it to be over when it is needed, after the gathers before it and between the reductions (by copy engine,
    concurrently with them), and no earlier than the memory has room for; one call ahead where nothing was measured, or
    where that is predicted to be as fast. Never above the same bucket's previous ``Reshard``, an ``Update``, or the
    start of the step.
    """
    ahead, costs = schedule.facts.prefetch, schedule.costs
    if ahead != "auto":
        return _calls_ahead(schedule, ahead)
    if costs is None:
        return _calls_ahead(schedule, 1)
    most = limit(schedule, costs)
    choices = [schedule, _calls_ahead(schedule, 1), _in_time(schedule, costs, most)]
    predictions = [predict(choice, costs) for choice in choices]
    fitting = [n for n, p in enumerate(predictions) if p.peak <= most] or [0]
    fastest = min(predictions[n].seconds for n in fitting)
    best = min(
        (n for n in fitting if predictions[n].seconds <= fastest * (1 + _EQUAL)), key=lambda n: predictions[n].peak
    )
    return choices[best]


def limit(schedule: Schedule, costs: Costs) -> int:
    """Bytes of flats, reductions in flight and activations that "auto" may reach; see `Facts.memory`."""
    if schedule.facts.memory is not None:
        return schedule.facts.memory
    largest = max((bucket.nbytes for bucket in schedule.facts.buckets), default=0)
    return predict(_calls_ahead(schedule, 1), costs).peak + largest


def _in_time(schedule: Schedule, costs: Costs, most: int) -> Schedule:
    """Each gather as late as it is in time, from the last to the first."""
    instructions = schedule.instructions
    events = Events(schedule, costs)
    begins = [0.0, *accumulate(costs.compute)]  # of each event, if nothing waited
    reductions, engine = _reductions_end(schedule, costs, begins), [0.0] * (len(begins) + 1)
    moved: dict[int, list[Instruction]] = {}
    taken: set[int] = set()
    later = float("inf")  # when the gather after it must start at the latest
    for index, bucket, behind, wait in reversed(_gathers(schedule)):
        nbytes = schedule.facts.by_id[bucket].nbytes
        seconds = costs.seconds("all_gather", bucket, nbytes) * _MARGIN
        over = min(begins[events.before[wait]], later)
        lane = engine if schedule.by_copy_engine("all_gather", bucket) else reductions
        event = here = events.before[index]
        while event > events.before[behind] and max(begins[event], lane[event]) + seconds > over:
            if not events.fits(nbytes, event - 1, event, most):
                break
            event -= 1
        events.take(nbytes, event, here)
        later = max(begins[event], over - seconds)
        if event < here:
            moved.setdefault(events.slots[event], []).insert(0, instructions[index])
            taken.add(index)
    return schedule.rearranged(moved, taken)


def _gathers(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """(index, bucket, index that it stays after, index of its Wait) of each Unshard that starts a gather."""
    found: list[tuple[int, int, int, int]] = []
    floor: dict[int, int] = {}
    waiting: dict[int, tuple[int, int]] = {}
    barrier = 0
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Update():
                barrier = index
            case Reshard(bucket):
                floor[bucket] = index
            case Unshard(bucket) if index in schedule.gathers:
                waiting[bucket] = (index, max(floor.get(bucket, 0), barrier))
            case Wait(bucket) if bucket in waiting:
                at, behind = waiting.pop(bucket)
                found.append((at, bucket, behind, index))
    return sorted(found)


def _reductions_end(schedule: Schedule, costs: Costs, begins: list[float]) -> list[float]:
    """For each event, and the end: when the reductions issued before it are over, if nothing else is sent."""
    ends, free, event = [0.0], 0.0, 0
    for instruction in schedule.instructions:
        if not is_event(instruction):
            continue
        if isinstance(instruction, Reduce):
            nbytes = schedule.facts.by_id[instruction.bucket].nbytes
            seconds = costs.seconds("reduce_scatter", instruction.bucket, nbytes)
            free = max(free, begins[event]) + seconds
        ends.append(free)
        event += 1
    return ends


def _calls_ahead(schedule: Schedule, ahead: int) -> Schedule:
    """Every gather ``ahead`` calls before its ``Wait``.

    Calls that follow each other in one phase on the same buckets count as one stretch, together with calls
    between and after them that use no bucket: an eager block of twenty modules is fetched while the block
    before it runs, not while its last module does. The turn from forward to backward begins a new stretch
    even on one bucket.

    Never above the same bucket's previous ``Reshard``, an ``Update``, or the start of the step. The gather is
    issued after everything before the call has been dropped. So while a call of stretch s runs, no more is
    unsharded (kept buckets aside) than open calls and the stretches s … s + prefetch use, and a call without
    buckets adds nothing: 1 + prefetch buckets where calls use one bucket each and do not nest. Prefetch 0
    changes nothing, nor does a second application.
    """
    runs: list[int] = []  # the index of each Run
    stretch: list[int] = []  # and the number of its stretch
    first = [0]  # of each stretch, the number of its first Run
    last: tuple[frozenset[int], Phase] | None = None
    for index, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Run):
            key = (frozenset(instruction.uses), instruction.call.phase) if instruction.uses else last
            if last is not None and key != last:
                first.append(len(runs))
            last = key
            stretch.append(len(first) - 1)
            runs.append(index)
    if not ahead or not runs:
        return schedule
    stretch.append(len(first))  # of what comes after the last Run
    moved: dict[int, list[Instruction]] = {}  # index -> Unshards to issue before it
    taken: set[int] = set()
    for index, _, behind, wait in _gathers(schedule):
        ahead_of = first[max(0, stretch[bisect_left(runs, wait)] - ahead)]
        target = max(ahead_of, bisect_left(runs, behind))
        if target < len(runs) and (slot := schedule.slot(runs[target])) < index:
            moved.setdefault(slot, []).append(schedule.instructions[index])
            taken.add(index)
    return schedule.rearranged(moved, taken)
