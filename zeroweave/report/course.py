"""The course of a schedule's step, measured or predicted, in one form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zeroweave.engine.samples import About
from zeroweave.schedule import Costs, Measured, Operation, Prediction, Schedule, Step, dependencies, simulate


@dataclass(frozen=True)
class Course(Prediction):
    """A prediction, or a measured step in the same form. It has no memory where the device does not count it."""

    name: str

    @property
    def exposed(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(self.waits.values())

    @cached_property
    def takes(self) -> dict[int, float]:
        """How long each instruction occupies its lane: of collectives or of computation."""
        compute: dict[int, float] = {}
        collectives: dict[int, float] = {}
        for span in self.spans:
            lane = compute if span.lane == "compute" else collectives
            lane[span.index] = lane.get(span.index, 0.0) + span.stop - span.start
        return compute | collectives


def predicted(schedule: Schedule, costs: Costs) -> Course:
    """The simulator's prediction."""
    return Course(**vars(simulate(schedule, costs)), name="predicted")


def measured(step: Step, costs: Costs, name: str = "measured") -> Course:
    """The step of one rank. Memory is counted from the start of the step, as in the prediction."""
    starts = tuple(moment.start for moment in step.moments)
    allocated = [moment.allocated for moment in step.moments]
    memory: tuple[int, ...] = ()
    if any(allocated):
        before = allocated[0] - simulate(step.schedule, costs).memory[0]
        memory = tuple(moment.most - before for moment in step.moments)
    return Course(step.seconds, starts, step.waits, memory, step.spans, name=name)


def farthest(one: Course, other: Course) -> tuple[int, int] | None:
    """Where the memory of two courses of a schedule differs most: the instruction's index, and by how many bytes.

    Negative where the first course has less. None where memory is not counted.
    """
    gaps = [mine - theirs for mine, theirs in zip(one.memory, other.memory, strict=False)]
    return max(enumerate(gaps), key=lambda each: abs(each[1])) if gaps else None


@dataclass(frozen=True)
class Courses:
    """A schedule and the known courses of its step, the measured one first.

    longest: seconds of the critical path. seconds: of making templates and the schedule, by phase. agreed: True if the
    prediction was made from costs that the ranks had agreed on before, and not from the measured steps themselves.
    others: the fastest and the slowest measured step, where they are not the first of the courses. operations: the
    collectives of the measured step. about: what the engine reports about itself.
    """

    schedule: Schedule
    courses: tuple[Course, ...]
    longest: float
    seconds: Mapping[str, float]
    agreed: bool
    others: tuple[Course, ...] = ()
    operations: tuple[Operation, ...] = ()
    about: About | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Courses:
        """From what `Schedule.save` wrote, or an engine that was asked for a measured step. Raises ScheduleError."""
        found = Measured.load(path)
        schedule = found.step.schedule if found else Schedule.load(path)
        costs = schedule.costs or (found.costs if found else None)
        if costs is None:
            return cls(schedule, (), 0.0, {}, False)
        courses = (predicted(schedule, costs),)
        longest, _ = dependencies(schedule).critical_path(costs)
        if found is None:
            return cls(schedule, courses, longest, {}, True)
        names = "fastest", "slowest"
        others = [measured(step, found.costs, name) for name, step in zip(names, found.others, strict=False)]
        return cls(
            schedule,
            (measured(found.step, found.costs), *courses),
            longest,
            found.seconds,
            schedule.costs is not None,
            tuple(others),
            found.step.operations,
            None if found.about is None else About.found(found.about, os.fspath(path)),
        )
