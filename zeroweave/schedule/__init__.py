"""Schedules: the instructions of one whole training step, built, improved and verified without torch."""

from __future__ import annotations

from collections.abc import Sequence

from zeroweave.errors import ScheduleError
from zeroweave.schedule.build import Schedule, build
from zeroweave.schedule.cost import Prediction, Span, simulate
from zeroweave.schedule.facts import BucketFacts, Costs, Facts, Line
from zeroweave.schedule.graph import Graph, dependencies
from zeroweave.schedule.instructions import (
    Call,
    End,
    Entered,
    Event,
    Free,
    Fuse,
    Instruction,
    Left,
    Micro,
    Needed,
    Offload,
    Phase,
    Ready,
    Reduce,
    Release,
    Reload,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
)
from zeroweave.schedule.measured import Measured
from zeroweave.schedule.passes import PASSES, Pass
from zeroweave.schedule.record import Moment, Operation, Operations, Step, costs_of
from zeroweave.schedule.verify import verify

__all__ = [
    "PASSES",
    "BucketFacts",
    "Call",
    "Costs",
    "End",
    "Entered",
    "Event",
    "Facts",
    "Free",
    "Fuse",
    "Graph",
    "Instruction",
    "Left",
    "Line",
    "Measured",
    "Micro",
    "Moment",
    "Needed",
    "Offload",
    "Operation",
    "Operations",
    "Pass",
    "Phase",
    "Prediction",
    "Ready",
    "Reduce",
    "Release",
    "Reload",
    "Reshard",
    "Run",
    "Schedule",
    "Settle",
    "Span",
    "Step",
    "Unshard",
    "Update",
    "Wait",
    "build",
    "compile_schedule",
    "costs_of",
    "dependencies",
    "simulate",
    "verify",
]


def compile_schedule(record: tuple[Event, ...], facts: Facts, passes: Sequence[Pass] = PASSES) -> Schedule:
    """Build the schedule of a record, run the passes and verify the result; raises ScheduleError.

    Where a pass that is not one of `PASSES` makes the schedule illegal, the error names it.
    """
    schedule = build(record, facts)
    for improve in passes:
        improved = improve(schedule)
        if improve not in PASSES:
            _check(improve, schedule, improved)
        schedule = improved
    verify(schedule)
    return schedule


def _check(own: Pass, before: Schedule, after: Schedule) -> None:
    name = getattr(own, "__qualname__", own)
    if not isinstance(after, Schedule):
        raise ScheduleError(f"pass {name!r} returned {type(after).__name__}, not a Schedule")
    if after.record != before.record or after.facts != before.facts:
        raise ScheduleError(f"pass {name!r} changes the record or the facts: it may change instructions only")
    try:
        verify(after)
    except ScheduleError as error:
        raise ScheduleError(f"pass {name!r}: {error}") from None
