"""Which updates need not wait for the end of a window, where it is known beforehand that the window comes to it."""

from __future__ import annotations

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import is_event, simulate
from zeroweave.schedule.instructions import Reduce, Run, Settle, Unshard, Wait


def early_updates(schedule: Schedule) -> frozenset[int]:
    """The buckets to be updated behind their last ``Settle``: nothing gathers, uses or reduces them any more.

    By measured costs, some are left for the end: as many as are updated in the time that the last reductions take.
    None where buckets are not updated one by one.
    """
    if not schedule.facts.update_by_bucket:
        return frozenset()
    instructions = schedule.instructions
    settled = {i.bucket: index for index, i in enumerate(instructions) if isinstance(i, Settle)}
    touched = [(i.bucket, index) for index, i in enumerate(instructions) if isinstance(i, Unshard | Wait | Reduce)]
    for start, end in schedule.calls.values():
        call = instructions[start]
        assert isinstance(call, Run)
        touched += [(bucket, end) for bucket in call.uses]
    late = {bucket for bucket, index in touched if index > settled.get(bucket, index)}
    return frozenset(settled) - late - _beside_reductions(schedule)


def _beside_reductions(schedule: Schedule) -> set[int]:
    """Those that are updated while the last reductions are under way."""
    costs = schedule.costs
    if costs is None:
        return set()
    prediction = simulate(schedule, costs)
    over = {
        schedule.instructions[span.index].bucket: span.stop  # type: ignore[union-attr]
        for span in prediction.spans
        if span.lane == "reduce_scatter"
    }
    end = 1 + max(index for index, i in enumerate(schedule.instructions) if is_event(i))
    if not over or end >= len(prediction.starts):
        return set()
    last, begins = max(over.values()), prediction.starts[end]
    waits = last - begins
    left = set[int]()
    for bucket in sorted(over, key=lambda each: -over[each]):
        if waits <= 0.0:
            break
        if over[bucket] < last:  # what is over last is updated behind all
            left.add(bucket)
            waits -= costs.update.get(bucket, 0.0)
    return left
