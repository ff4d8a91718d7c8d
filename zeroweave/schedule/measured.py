"""A measured step with its schedule, as a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zeroweave.errors import ScheduleError
from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.record import Moment, Step
from zeroweave.schedule.save import Marks, read, write


@dataclass(frozen=True)
class Measured:
    """How one rank ran its schedule.

    step: one whole step. costs: of all steps that were measured with it. seconds: of making templates and the
    schedule, by phase.
    """

    step: Step
    costs: Costs
    seconds: Mapping[str, float]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file, which is the schedule's as well: `Schedule.load` reads it."""
        schedule = self.step.schedule
        marks = Marks(
            moments=tuple((moment.start, moment.stop, moment.allocated) for moment in self.step.moments),
            collectives=tuple((each.kind, each.bucket, each.issued, each.over) for each in self.step.operations),
            costs=self.costs,
            seconds=dict(self.seconds),
            copies=tuple((each.index, each.nbytes, each.start, each.stop) for each in self.step.copies),
        )
        write(path, schedule.instructions, schedule.record, schedule.facts, marks)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measured | None:
        """What was saved; None where the file holds a schedule only. ScheduleError as from `Schedule.load`."""
        schedule, marks = Schedule.load(path), read(path).measured
        if marks is None:
            return None
        count, expected = len(marks.moments), len(schedule.instructions)
        if count != expected:
            raise ScheduleError(f"{os.fspath(path)}: measured.moments: {count} for {expected} instructions")
        moments = [Moment(what, *when) for what, when in zip(schedule.instructions, marks.moments, strict=True)]
        return cls(Step.of(schedule, moments, marks.collectives, marks.copies), marks.costs, marks.seconds)
