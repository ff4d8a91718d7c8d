"""A pass that gathers anew what the next step needs first, whatever it costs."""

from __future__ import annotations

from zeroweave.schedule import Schedule, Update
from zeroweave.schedule.passes.heads import early

COUNT = 2
"""Buckets that it takes."""


def forced(schedule: Schedule) -> Schedule:
    """As `heads`, but never for time or memory, and behind all other passes."""
    if schedule.costs is None or schedule.regathers or not schedule.facts.regather:
        return schedule
    updated = {i.bucket for i in schedule.instructions if isinstance(i, Update)}
    used = dict.fromkeys(b for event in schedule.record for b in getattr(event, "uses", ()) if b in updated)
    return early(schedule, list(used)[:COUNT], schedule.costs)
