"""A measured step with its schedule, as a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroweave.errors import ScheduleError
from zeroweave.schedule.build import Schedule
from zeroweave.schedule.facts import Costs
from zeroweave.schedule.record import Moment, Step
from zeroweave.schedule.save import Marks, StepMarks, read, write


@dataclass(frozen=True)
class Measured:
    """How one rank ran its schedule.

    step: one whole step. costs: of all steps that were measured with it. seconds: of making templates and the
    schedule, by phase. others: further whole steps of the same schedule. about: what the engine told about itself, as
    JSON has it; None: nothing.
    """

    step: Step
    costs: Costs
    seconds: Mapping[str, float]
    others: tuple[Step, ...] = ()
    about: dict[str, Any] | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file, which is the schedule's as well: `Schedule.load` reads it."""
        schedule = self.step.schedule
        marks = Marks(
            **vars(_marks(self.step)),
            costs=self.costs,
            seconds=dict(self.seconds),
            others=tuple(map(_marks, self.others)),
            about=self.about,
        )
        write(path, schedule.instructions, schedule.record, schedule.facts, marks)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measured | None:
        """What was saved; None where the file holds a schedule only. ScheduleError as from `Schedule.load`."""
        schedule, marks = Schedule.load(path), read(path).measured
        if marks is None:
            return None
        name = f"{os.fspath(path)}: measured"
        step = _step(schedule, marks, name)
        others = [_step(schedule, each, f"{name}.others.{index}") for index, each in enumerate(marks.others)]
        return cls(step, marks.costs, marks.seconds, tuple(others), marks.about)


def _marks(step: Step) -> StepMarks:
    return StepMarks(
        moments=tuple((moment.start, moment.stop, moment.allocated) for moment in step.moments),
        collectives=tuple((each.kind, each.bucket, each.issued, each.over) for each in step.operations),
        copies=tuple((each.index, each.nbytes, each.start, each.stop) for each in step.copies),
    )


def _step(schedule: Schedule, marks: StepMarks, name: str) -> Step:
    """`name`: of the marks, for errors."""
    count, expected = len(marks.moments), len(schedule.instructions)
    if count != expected:
        raise ScheduleError(f"[ZW703] {name}.moments: {count} for {expected} instructions")
    moments = [Moment(what, *when) for what, when in zip(schedule.instructions, marks.moments, strict=True)]
    return Step.of(schedule, moments, marks.collectives, marks.copies)
