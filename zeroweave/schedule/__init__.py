"""Schedules: the instructions of one whole training step, built, improved and verified without torch."""

from __future__ import annotations

from collections.abc import Sequence

from zeroweave.errors import ScheduleError
from zeroweave.schedule.budget import budget as budget
from zeroweave.schedule.budget import fixed as fixed
from zeroweave.schedule.budget import foreseen as foreseen
from zeroweave.schedule.budget import grown as grown
from zeroweave.schedule.budget import lowered as lowered
from zeroweave.schedule.budget import margin as margin
from zeroweave.schedule.build import Schedule as Schedule
from zeroweave.schedule.build import build as build
from zeroweave.schedule.cost import Prediction as Prediction
from zeroweave.schedule.cost import Span as Span
from zeroweave.schedule.cost import flats_of as flats_of
from zeroweave.schedule.cost import simulate as simulate
from zeroweave.schedule.facts import BucketFacts as BucketFacts
from zeroweave.schedule.facts import Costs as Costs
from zeroweave.schedule.facts import Facts as Facts
from zeroweave.schedule.facts import Line as Line
from zeroweave.schedule.graph import Graph as Graph
from zeroweave.schedule.graph import dependencies as dependencies
from zeroweave.schedule.instructions import Call as Call
from zeroweave.schedule.instructions import End as End
from zeroweave.schedule.instructions import Entered as Entered
from zeroweave.schedule.instructions import Event as Event
from zeroweave.schedule.instructions import Free as Free
from zeroweave.schedule.instructions import GatherAcross as GatherAcross
from zeroweave.schedule.instructions import Instruction as Instruction
from zeroweave.schedule.instructions import Left as Left
from zeroweave.schedule.instructions import Micro as Micro
from zeroweave.schedule.instructions import Needed as Needed
from zeroweave.schedule.instructions import Offload as Offload
from zeroweave.schedule.instructions import Phase as Phase
from zeroweave.schedule.instructions import Ready as Ready
from zeroweave.schedule.instructions import Reduce as Reduce
from zeroweave.schedule.instructions import ReduceAcross as ReduceAcross
from zeroweave.schedule.instructions import Release as Release
from zeroweave.schedule.instructions import Reload as Reload
from zeroweave.schedule.instructions import Reshard as Reshard
from zeroweave.schedule.instructions import Run as Run
from zeroweave.schedule.instructions import Settle as Settle
from zeroweave.schedule.instructions import Stage as Stage
from zeroweave.schedule.instructions import Unshard as Unshard
from zeroweave.schedule.instructions import Update as Update
from zeroweave.schedule.instructions import Wait as Wait
from zeroweave.schedule.kinds import WindowKind as WindowKind
from zeroweave.schedule.kinds import WindowKinds as WindowKinds
from zeroweave.schedule.passes import PASSES as PASSES
from zeroweave.schedule.passes import Pass as Pass
from zeroweave.schedule.record import Measured as Measured
from zeroweave.schedule.record import Moment as Moment
from zeroweave.schedule.record import Operation as Operation
from zeroweave.schedule.record import Operations as Operations
from zeroweave.schedule.record import Step as Step
from zeroweave.schedule.record import costs_of as costs_of
from zeroweave.schedule.verify import verify as verify


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
        raise ScheduleError(f"[ZW702] pass {name!r} returned {type(after).__name__}, not a Schedule")
    if after.record != before.record or after.facts != before.facts:
        raise ScheduleError(f"[ZW702] pass {name!r} changes the record or the facts: it may change instructions only")
    try:
        verify(after)
    except ScheduleError as error:
        raise ScheduleError(f"[ZW702] pass {name!r}: {error}") from None
