"""Which updates need not wait for the end of a window, where it is known beforehand that the window comes to it."""

from __future__ import annotations

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import collective_seconds, is_event, simulate
from zeroweave.schedule.instructions import Reduce, Regather, Run, Settle, Unshard, Update, Wait


def early_updates(schedule: Schedule) -> frozenset[int]:
    """The buckets to be updated behind their last ``Settle``: nothing gathers, uses or reduces them any more.

    By measured costs, some are left for the end: as many as are updated in the time that the last reductions take, and
    the gathers behind the last updates.
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
    may = frozenset(settled) - late
    return may - _beside_collectives(schedule, may)


def _beside_collectives(schedule: Schedule, may: frozenset[int]) -> set[int]:
    """Those that are updated while the end of the window waits for collectives. `may`: they could be updated before.

    Each wait for a reduction has the last updates in front of it for its time, and what is gathered anew the last ones
    behind it, as far as more than half of each lies in it.
    """
    costs, instructions = schedule.costs, schedule.instructions
    if costs is None:
        return set()
    prediction = simulate(schedule, costs)
    over = {i.bucket: prediction.over[index] for index, i in enumerate(instructions) if isinstance(i, Reduce)}
    end = 1 + max((index for index, i in enumerate(instructions) if is_event(i)), default=-1)
    now = max((span.stop for span in prediction.spans if span.lane == "compute" and span.index < end), default=0.0)
    settled = {i.bucket for i in instructions[:end] if isinstance(i, Settle)}
    free = {False: max(over.values(), default=0.0), True: 0.0}  # lanes: by kernel; by copy engine, idle by now
    behind = 0  # so many of `before` are in front of the last Regather
    left, before = set[int](), list[int]()

    def leave(until: float, first: int = 0) -> float:
        """Leaves the last of `before` for the time until then. Returns when they are over, or what time it is."""
        passed = now
        while len(before) > first and until > passed:
            update = costs.update.get(before[-1], 0.0)
            if not 0.0 < update < 2 * (until - passed):
                break
            left.add(before.pop())
            passed += update
        return passed

    for index, instruction in enumerate(instructions[end:], end):
        match instruction:
            case Update(bucket) if bucket in may and bucket in settled:
                before.append(bucket)
            case Update(bucket):
                now += costs.update.get(bucket, 0.0)
            case Settle(bucket):
                settled.discard(bucket)
                now = max(leave(over[bucket]), over[bucket])
                behind = min(behind, len(before))
            case Regather(bucket):
                copies = schedule.by_copy_engine("all_gather", bucket)
                free[copies] = max(now, free[copies]) + collective_seconds(schedule, index, costs)
                behind = len(before)
    if schedule.regathers:
        leave(max(free.values()), behind)
    return left
