"""The course of a schedule's step, measured or predicted, in one form, and as lanes over time.

The page draws the lanes, and Perfetto and chrome://tracing open them as a trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from zeroweave.engine.samples import About
from zeroweave.schedule import (
    Costs,
    Instruction,
    Measured,
    Operation,
    Prediction,
    Run,
    Schedule,
    Settle,
    Span,
    Step,
    Update,
    Wait,
    dependencies,
    simulate,
)


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


# ---------------------------------------------------------------------- as lanes over time
NAMES: Final = {
    "compute": "computation",
    "all_gather": "gathers",
    "reduce_scatter": "reductions",
    "update": "updates",
    "copy": "copies",
}
"""The lanes from top to bottom, with the names that the page shows."""
_KINDS: Final = {"all_gather": "gather", "reduce_scatter": "reduce", "copy": "copy"}


@dataclass(frozen=True)
class Slice:
    """What happened between two moments on a lane.

    kind: forward, backward, other (the program's own computation), update, gather, reduce, copy, or wait, where the
    computation waits. start, seconds: in seconds. index: the instruction's. what: the text that is shown.
    """

    kind: str
    start: float
    seconds: float
    index: int
    what: str


@dataclass(frozen=True)
class Lane:
    """Slices in the order of time. They do not overlap."""

    name: str
    slices: tuple[Slice, ...]


def lanes(schedule: Schedule, course: Course) -> tuple[Lane, ...]:
    """The lanes of a course that have slices. Waits are on the lane of the computation."""
    found: dict[str, list[Slice]] = {name: [] for name in NAMES}
    for span in course.spans:
        if span.stop <= span.start:
            continue
        instruction = schedule.instructions[span.index]
        lane = "update" if isinstance(instruction, Update) else span.lane
        kind, what = _named(schedule, span)
        found[lane].append(Slice(kind, span.start, span.stop - span.start, span.index, what))
    for index, seconds in course.waits.items():
        what = f"stands still at {schedule.describe(schedule.instructions[index])}"
        found["compute"].append(Slice("wait", course.starts[index], seconds, index, what))
    return tuple(
        Lane(NAMES[lane], tuple(sorted(slices, key=lambda each: each.start)))
        for lane, slices in found.items()
        if slices
    )


def trace(schedule: Schedule, courses: Sequence[Course]) -> dict[str, Any]:
    """What `json.dump` takes, in the JSON object format of Chrome's trace events.

    Times in microseconds; a process for each course, 1 for the measured one and 2 for the predicted one; a thread for
    each lane; memory as a counter.
    """
    events = [event for course in courses for event in _events(schedule, course)]
    return {"traceEvents": sorted(events, key=lambda event: event.get("ts", -1.0)), "displayTimeUnit": "ms"}


def _events(schedule: Schedule, course: Course) -> Iterator[dict[str, Any]]:
    process, threads = 1 if course.name == "measured" else 2, [*NAMES.values()]
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": course.name}}
    for lane in lanes(schedule, course):
        where = {"pid": process, "tid": 1 + threads.index(lane.name)}
        yield {"ph": "M", "name": "thread_name", "args": {"name": lane.name}, **where}
        for each in lane.slices:
            shown = {"name": each.what, "cat": each.kind, "args": {"instruction": each.index}}
            yield {"ph": "X", "ts": 1e6 * each.start, "dur": 1e6 * each.seconds, **shown, **where}
    for start, nbytes in zip(course.starts, course.memory, strict=bool(course.memory)):
        yield {"ph": "C", "name": "memory", "pid": process, "ts": 1e6 * start, "args": {"bytes": nbytes}}


def _named(schedule: Schedule, span: Span) -> tuple[str, str]:
    """The kind of a slice, and its text."""
    instruction = schedule.instructions[span.index]
    what = schedule.describe(instruction)
    if (kind := _KINDS.get(span.lane)) is not None:
        return kind, what
    if isinstance(instruction, Run):
        return instruction.call.phase, what
    if isinstance(instruction, Update):
        return "update", what
    return "other", f"computation behind {what}"


def shares(schedule: Schedule, course: Course) -> dict[str, float]:
    """Seconds of the step by the kinds of what the compute stream does. Waits count by what they wait for.

    "rest": the rest of the step's duration.
    """
    found = dict.fromkeys(("forward", "backward", "other", "update", "gather", "reduce", "copy"), 0.0)
    for span in course.spans:
        if span.lane == "compute":
            found[_named(schedule, span)[0]] += span.stop - span.start
    awaited: dict[type[Instruction], str] = {Settle: "reduce", Wait: "gather"}
    for index, seconds in course.waits.items():
        # `Release` waits for activations on their way out, an event for those on their way back.
        found[awaited.get(type(schedule.instructions[index]), "copy")] += seconds
    return {**found, "rest": max(0.0, course.seconds - sum(found.values()))}
