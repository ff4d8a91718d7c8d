"""A pass that gathers anew what the next step needs first, whatever it costs."""

from __future__ import annotations

from dataclasses import replace

from zeroweave.schedule import Schedule, Update, compile_schedule
from zeroweave.schedule.passes.heads import early

COUNT = 2
"""Buckets that it takes."""


def forced(schedule: Schedule) -> Schedule:
    """As `heads`, but never for time or memory, behind all other passes, and in the place of what `heads` has done."""
    facts = schedule.facts
    if schedule.costs is None or not facts.regather:
        return schedule
    without = compile_schedule(schedule.record, replace(facts, regather=False))
    updated = {i.bucket for i in schedule.instructions if isinstance(i, Update)}
    used = dict.fromkeys(b for event in schedule.record for b in getattr(event, "uses", ()) if b in updated)
    return early(replace(without, facts=facts), list(used)[:COUNT], schedule.costs)
