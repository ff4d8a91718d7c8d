"""A pass that gathers anew what the next step needs first, whatever it costs."""

from __future__ import annotations

from dataclasses import replace

from zeroweave.schedule import Schedule, Update, compile_schedule
from zeroweave.schedule.instructions import Micro
from zeroweave.schedule.passes.heads import early

COUNT = 2
"""Buckets that it takes."""


def forced(schedule: Schedule) -> Schedule:
    """As `heads`, but never for time or memory, behind all other passes, and in the place of what `heads` has done."""
    return _with(schedule, slice(COUNT))


def by_length(schedule: Schedule) -> Schedule:
    """As `forced`, but of windows of several micro-steps the second bucket alone."""
    length = sum(isinstance(event, Micro) for event in schedule.record)
    return _with(schedule, slice(COUNT) if length == 1 else slice(1, COUNT))


def _with(schedule: Schedule, chosen: slice) -> Schedule:
    """With these of the buckets that it uses, in that order, gathered anew."""
    facts = schedule.facts
    if schedule.costs is None or not facts.regather:
        return schedule
    without = compile_schedule(schedule.record, replace(facts, regather=False))
    updated = {i.bucket for i in schedule.instructions if isinstance(i, Update)}
    used = dict.fromkeys(b for event in schedule.record for b in getattr(event, "uses", ()) if b in updated)
    return early(replace(without, facts=facts), list(used)[chosen], schedule.costs)
