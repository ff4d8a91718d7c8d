"""Heads: what the next step needs first is updated first, and gathered under the other updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from typing import Final

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import Prediction, is_event, simulate
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.instructions import Instruction, Reduce, Regather, Settle, Update
from zeroweave.schedule.passes.fuse import fuse
from zeroweave.schedule.passes.insert import insert
from zeroweave.schedule.passes.keep import held, keep
from zeroweave.schedule.passes.prefetch import prefetch
from zeroweave.schedule.passes.room import predict, price

_MOST: Final = 8
"""Buckets that are looked at: what comes later in the step is gathered under what comes before."""
_IN_VAIN: Final = 2
"""So many in a row gain nothing, and no more are looked at: each look takes what all passes take."""


def heads(schedule: Schedule) -> Schedule:
    """Update the buckets that the next step gathers first as soon as their reductions are over, and gather them anew.

    Before:  Unshard 0 · Wait 0 · Run 0 · … · Settle 1 · Update 1 · Settle 0 · Update 0
    After:   Unshard 0 (stays) · Wait 0 · Run 0 · … · Settle 0 · Update 0 · Regather 0 · Settle 1 · Update 1

    They stay gathered from then on: where they lie is what graphs of steps know. So they take memory in the whole
    step, and as many do as ``facts.memory`` has room for and the step is predicted to gain by. What room is left is for
    the pass ``keep``, and both are compared with what that does alone. Only where ``facts.keep`` is "auto", by measured
    costs, and where each ``Update`` is over before what comes behind it.

    So is the first of those that the stage keeps in the step anyway, if nothing is lost: a step cannot begin without
    it. At the end of the step before, the program's way to the next one lies beside it, which is no part of either.
    """
    costs, facts, most = schedule.costs, schedule.facts, schedule.facts.memory
    if costs is None or most is None or facts.keep != "auto" or not facts.regather:
        return schedule
    best, cheapest = schedule, price(_foreseen(schedule, costs))
    chosen: list[int] = []
    in_vain = 0
    for bucket in _first(schedule):
        choice = early(schedule, [*chosen, bucket], costs)
        prediction = _foreseen(choice, costs)
        if prediction.peak > most:  # a smaller one may have room
            continue
        chosen.append(bucket)
        in_vain += 1
        cost = price(prediction)
        as_dear = chosen == [bucket] and _waits_anyway(schedule, bucket, costs) and isclose(cost, cheapest)
        if cost < cheapest or as_dear:
            best, cheapest, in_vain = choice, cost, 0
        if in_vain == _IN_VAIN:
            break
    return best


def _waits_anyway(schedule: Schedule, bucket: int, costs: Costs) -> bool:
    """Is the bucket, which is gathered first, there for the whole step, and something to wait for?"""
    facts = schedule.facts
    return bucket in facts.kept_by_stage and costs.seconds("all_gather", bucket, facts.sizes[bucket]) > 0


def _foreseen(schedule: Schedule, costs: Costs) -> Prediction:
    """With what the passes behind this one do that gather."""
    return predict(fuse(insert(prefetch(keep(schedule)))), costs)


def _first(schedule: Schedule) -> list[int]:
    """The buckets that a step gathers first, if it updates them."""
    updated = {i.bucket for i in schedule.instructions if isinstance(i, Update)}
    gathered = [i.bucket for n, i in enumerate(schedule.instructions) if n in schedule.gathers]  # type: ignore[union-attr]
    return [bucket for bucket in dict.fromkeys(gathered) if bucket in updated][:_MOST]


def early(schedule: Schedule, buckets: Sequence[int], costs: Costs) -> Schedule:
    """With these updated as soon as that takes no waiting, and gathered anew."""
    ahead = held(schedule, buckets, ())
    dropped = {n for n in ahead.drops if ahead.instructions[n].bucket in buckets}  # type: ignore[union-attr]
    staying = ahead.rearranged({}, dropped)
    end = 1 + max(n for n, i in enumerate(staying.instructions) if is_event(i))
    return replace(staying, instructions=(*staying.instructions[:end], *_reordered(staying, end, buckets, costs)))


def _reordered(schedule: Schedule, end: int, buckets: Sequence[int], costs: Costs) -> list[Instruction]:
    """What comes behind the last event, with the updates of these where their reductions are predicted to be over."""
    tail = schedule.instructions[end:]
    over, now = _expected(schedule, end, costs)
    waiting = {i.bucket for i in tail if isinstance(i, Settle) and i.bucket in buckets}
    out: list[Instruction] = []
    left = list(buckets)  # as they are needed
    together = not schedule.facts.update_by_bucket  # all settle first then

    def take(bucket: int) -> float:
        left.remove(bucket)
        out.extend([Settle(bucket)] if bucket in waiting and not together else [])
        out.extend([Update(bucket), Regather(bucket)])
        return max(now, over.get(bucket, 0.0)) + costs.update.get(bucket, 0.0)

    for instruction in tail:
        match instruction:
            case Update(bucket):
                for each in list(left):
                    if together or each not in waiting or over[each] <= now:
                        now = take(each)
                if bucket in left:
                    now = take(bucket)
                if bucket in buckets:
                    continue
                now += costs.update.get(bucket, 0.0)
            case Settle(bucket) if bucket in waiting and not together:
                continue
            case Settle(bucket):
                now = max(now, over.get(bucket, 0.0))
        out.append(instruction)
    return out


def _expected(schedule: Schedule, end: int, costs: Costs) -> tuple[dict[int, float], float]:
    """When the last reduction of each bucket is over, and when what comes at index ``end`` begins."""
    ahead = prefetch(schedule)  # which moves nothing behind the last event
    prediction = simulate(ahead, costs)
    over = {i.bucket: prediction.over[index] for index, i in enumerate(ahead.instructions) if isinstance(i, Reduce)}
    return over, prediction.starts[end] if end < len(prediction.starts) else prediction.seconds
