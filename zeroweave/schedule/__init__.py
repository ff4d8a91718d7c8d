"""Schedules: the instructions of one whole training step, built, improved and verified without torch."""

from __future__ import annotations

from zeroweave.schedule.build import BucketFacts, Facts, Schedule, build
from zeroweave.schedule.instructions import (
    Call,
    End,
    Entered,
    Event,
    Free,
    Instruction,
    Left,
    Micro,
    Phase,
    Ready,
    Reduce,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
)
from zeroweave.schedule.passes import PASSES
from zeroweave.schedule.verify import verify

__all__ = [
    "PASSES",
    "BucketFacts",
    "Call",
    "End",
    "Entered",
    "Event",
    "Facts",
    "Free",
    "Instruction",
    "Left",
    "Micro",
    "Phase",
    "Ready",
    "Reduce",
    "Reshard",
    "Run",
    "Schedule",
    "Settle",
    "Unshard",
    "Update",
    "Wait",
    "build",
    "compile_schedule",
    "verify",
]


def compile_schedule(record: tuple[Event, ...], facts: Facts) -> Schedule:
    """Build the schedule of a record, run all passes and verify the result; raises ScheduleError."""
    schedule = build(record, facts)
    for improve in PASSES:
        schedule = improve(schedule)
    verify(schedule)
    return schedule
