"""Which updates need not wait for the end of a window, where it is known beforehand that the window comes to it."""

from __future__ import annotations

from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import Reduce, Run, Settle, Unshard, Wait


def early_updates(schedule: Schedule) -> frozenset[int]:
    """The buckets that may be updated behind their last ``Settle``: nothing gathers, uses or reduces them any more.

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
    return frozenset(settled) - {bucket for bucket, index in touched if index > settled.get(bucket, index)}
