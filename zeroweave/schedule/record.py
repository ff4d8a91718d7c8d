"""What was measured of a step: each instruction's time, each collective's, the costs that follow, and its file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_high
from typing import Any

from zeroweave.errors import ScheduleError
from zeroweave.schedule.build import Schedule
from zeroweave.schedule.cost import (
    Span,
    away_of,
    flats_of,
    held_by_reductions,
    most_by_event,
    reductions,
    simulate,
)
from zeroweave.schedule.facts import Costs, Kind, Line
from zeroweave.schedule.graph import Graph, dependencies
from zeroweave.schedule.instructions import Instruction, Release, Settle, Update, is_event
from zeroweave.schedule.moves import moves_of
from zeroweave.schedule.save import Marks, StepMarks, read, write


@dataclass(frozen=True, slots=True)
class Moment:
    """An instruction, from when the compute stream came to it until it was past. Seconds from the step's start.

    ``allocated``: bytes of device memory in use afterwards; ``peak``: at most up to the end of the next one, with all
    that was computed meanwhile; 0 where memory is not counted. ``before``: of a ``Settle`` that had something
    to do, bytes in use when it began.
    """

    instruction: Instruction
    start: float
    stop: float
    allocated: int = 0
    peak: int = 0
    before: int = 0

    @property
    def most(self) -> int:
        """The larger of the two."""
        return max(self.allocated, self.peak)


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective of a recorded step. Seconds from the step's start; ``nbytes`` is the full flat's.

    It was ``issued`` at the instruction ``index`` of the schedule, ``started`` when the collective before it was
    over, and was ``over``. ``exposed``: how long the compute stream waited for it. ``after``: what it had to wait
    for before it could start, in words.
    """

    kind: Kind
    bucket: int
    name: str
    nbytes: int
    index: int
    issued: float
    started: float
    over: float
    exposed: float
    after: str

    @property
    def seconds(self) -> float:
        """How long it took once it ran."""
        return self.over - self.started


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` of activations on their way out or back, at the ``Offload`` or ``Reload`` ``index`` of the schedule.

    Seconds from the step's start.
    """

    index: int
    nbytes: int
    start: float
    stop: float


@dataclass(frozen=True)
class Step:
    """One recorded step that followed ``schedule`` to the end.

    waits: how long the compute stream waited for a collective or a copy, for each instruction that did, by index.
    """

    schedule: Schedule
    moments: tuple[Moment, ...]
    operations: tuple[Operation, ...]
    copies: tuple[Copy, ...]
    waits: dict[int, float]

    @property
    def seconds(self) -> float:
        """From the first instruction to the end of the last one."""
        return self.moments[-1].stop if self.moments else 0.0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What occupied each lane, and when. An event's computation lasts to the next one, in pieces where it waits."""
        spans = [Span(each.kind, each.index, each.started, each.over) for each in self.operations]
        spans += [Span("copy", each.index, each.start, each.stop) for each in self.copies]
        event: int | None = None
        begin = 0.0
        for index, moment in enumerate(self.moments):
            update = isinstance(moment.instruction, Update)
            starts = is_event(moment.instruction)
            if not (starts or update or index in self.waits):
                continue
            if event is not None:
                spans.append(Span("compute", event, begin, max(begin, moment.start)))
            if update:
                spans.append(Span("compute", index, moment.start, moment.stop))
                event = None
            elif starts:
                event = index
            begin = moment.start + self.waits.get(index, 0.0)
        if event is not None:
            spans.append(Span("compute", event, begin, max(begin, self.seconds)))
        return tuple(spans)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        moments: Sequence[Moment],
        collectives: Sequence[tuple[str, int, float, float]],
        copies: Sequence[tuple[int, int, float, float]] = (),
    ) -> Step:
        """From the executed instructions and the collectives (kind, bucket, issued, over) in the order of issue.

        ``copies``: (index, bytes, start, stop) of those that moved anything.

        Raises ScheduleError unless exactly the schedule's instructions were executed.
        """
        if tuple(moment.instruction for moment in moments) != schedule.instructions:
            raise ScheduleError("[ZW704] the step did not follow its schedule")
        sent: dict[tuple[str, int], deque[tuple[float, float]]] = {}  # (kind, bucket) -> (issued, over) of each
        for name, bucket, issued, over in collectives:
            sent.setdefault((name, bucket), deque()).append((issued, over))
        free = {False: 0.0, True: 0.0}  # of the queues of collectives: by kernel, by copy engine
        last = "the start of the step"
        lane = {False: "", True: ""}
        operations: list[Operation] = []
        positions: dict[int, int] = {}  # in operations, by the index of the instruction
        waits: dict[int, float] = {}
        for index, moment in enumerate(moments):
            instruction, until = moment.instruction, moment.start
            awaited = positions.get(schedule.producers.get(index, -1))
            if awaited is not None:
                until = operations[awaited].over
            elif isinstance(instruction, Release):
                until = moment.stop
            if (waited := min(moment.stop, until) - moment.start) > 0:
                waits[index] = waited
                if awaited is not None:
                    each = operations[awaited]
                    operations[awaited] = replace(each, exposed=each.exposed + waited)
            if index in schedule.sends and sent.get(schedule.sends[index]):
                (kind, bucket), (issued, over) = schedule.sends[index], sent[schedule.sends[index]].popleft()
                positions[index] = len(operations)
                facts = schedule.facts.by_id[bucket]
                by_engine = schedule.by_copy_engine(kind, bucket)
                # One that is over before its predecessor ran concurrently with it, as gloo's may.
                start = free[by_engine] if issued < free[by_engine] < over else issued
                after = f"{lane[by_engine]}, which ran before it" if start > issued else last
                free[by_engine] = max(over, free[by_engine])
                what = kind, facts.id, facts.name, facts.nbytes, index
                operations.append(Operation(*what, issued, start, over, 0.0, after))
                lane[by_engine] = f"the {kind} of {facts.name}"
            if is_event(instruction):
                last = schedule.describe(instruction)
        return cls(schedule, tuple(moments), tuple(operations), tuple(Copy(*each) for each in copies), waits)


@dataclass(frozen=True)
class Operations(Sequence[Operation]):
    """The collectives of a recorded step, in order, with what is needed to make another schedule of its record.

    agreed: true if the costs are those of all ranks. Else the ranks compute different things, and these are one rank's.
    """

    steps: tuple[Step, ...]
    costs: Costs
    agreed: bool

    @property
    def schedule(self) -> Schedule:
        return self.steps[-1].schedule

    def __len__(self) -> int:
        return len(self.steps[-1].operations)

    def __getitem__(self, index: int) -> Operation:  # type: ignore[override]
        return self.steps[-1].operations[index]

    @cached_property
    def graph(self) -> Graph:
        """What depends on what in the recorded schedule."""
        return dependencies(self.schedule)


def costs_of(steps: Sequence[Step], room: int = 0) -> Costs:
    """The costs that steps of one schedule had: of each time the median, of each memory the most.

    A collective counts with its shortest time, because it takes longer where ranks wait for each other in it.
    ``room``: bytes that could be allocated at most; 0 where that is unknown.
    """
    if not steps:
        raise ScheduleError("[ZW704] no step was recorded")
    computes = [_compute(step) for step in steps]
    updates: dict[int, list[float]] = {}
    for step in steps:
        for moment in step.moments:
            if isinstance(moment.instruction, Update):
                updates.setdefault(moment.instruction.bucket, []).append(moment.stop - moment.start)
    (gather, gathers), (reduce, reduces) = (_times(steps, kind) for kind in ("all_gather", "reduce_scatter"))
    costs = Costs(
        compute=tuple(median_high(each) for each in zip(*computes, strict=True)),
        update={bucket: median_high(seconds) for bucket, seconds in sorted(updates.items())},
        gathers=gathers,
        reductions=reduces,
        gather=gather,
        reduce=reduce,
        activations=tuple(max(each) for each in zip(*map(_activations, steps), strict=True)),
        copy=Line.fit((copy.nbytes, copy.stop - copy.start) for step in steps for copy in step.copies),
        moves=moves_of(steps[0].schedule.record),
        room=room,
        held=tuple(max(each) for each in zip(*map(_held, steps), strict=True)),
    )
    peak = max(moment.most for step in steps for moment in step.moments)
    filled = simulate(steps[0].schedule, costs).peak if peak else 0
    return replace(costs, filled=filled, resident=peak - filled)


def _times(steps: Sequence[Step], kind: Kind) -> tuple[Line, dict[int, float]]:
    """The line of all collectives by their bytes, and the shortest time of each bucket's."""
    sizes = steps[0].schedule.facts.sizes
    times: dict[int, float] = {}
    for each in (each for step in steps for each in step.operations if each.kind == kind):
        times[each.bucket] = min(each.seconds, times.get(each.bucket, each.seconds))
    return Line.fit((sizes[bucket], seconds) for bucket, seconds in times.items()), dict(sorted(times.items()))


def _compute(step: Step) -> list[float]:
    """Seconds from each event to the next, without waiting."""
    seconds = {index: 0.0 for index, moment in enumerate(step.moments) if is_event(moment.instruction)}
    for span in step.spans:
        if span.lane == "compute" and span.index in seconds:
            seconds[span.index] += span.stop - span.start
    return list(seconds.values())


def _activations(step: Step) -> list[int]:
    """Bytes in use at most at each event, without what was in use at the start, flats, and reductions in flight.

    That is all that a step takes and no pass moves: activations, reduced gradients, local sums, what an update needs
    for itself. What was away in host memory counts as if it had not been.
    """
    base: int | None = None
    memory: list[int] = []
    held = held_by_reductions(step.schedule, _held(step))
    flats = flats_of(step.schedule)
    away = away_of(step.schedule, moves_of(step.schedule.record))  # of this rank, not those that all have agreed on
    for moment, gone, gathered, flying in zip(step.moments, away, flats, held, strict=True):
        elsewhere = gone - gathered - flying
        base = moment.allocated + elsewhere if base is None else base
        memory.append(max(0, moment.most + elsewhere - base) if moment.allocated else 0)
    return most_by_event(step.schedule, memory)


def _held(step: Step) -> list[int]:
    """Bytes, without its gradient flat, that each event, if it is a reduction, has until it is settled.

    Gradients that were copied into the flat, casts, and the result where it is added to another: all that a ``Settle``
    frees. Negative without such a flat.
    """
    sizes, instructions = step.schedule.facts.sizes, step.schedule.instructions
    held = [0] * sum(map(is_event, instructions))
    for event, _, index in reductions(step.schedule):
        moment, instruction = step.moments[index], instructions[index]
        assert isinstance(instruction, Settle)
        if moment.before:
            held[event] = moment.before - moment.allocated - sizes[instruction.bucket]
    return held


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
        steps = tuple(map(_marks, (self.step, *self.others)))
        marks = Marks(steps, self.costs, dict(self.seconds), self.about)
        write(path, schedule.instructions, schedule.record, schedule.facts, marks)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measured | None:
        """What was saved; None where the file holds a schedule only. ScheduleError as from `Schedule.load`."""
        schedule, marks = Schedule.load(path), read(path).measured
        if marks is None:
            return None
        name = f"{os.fspath(path)}: measured.steps"
        step, *others = [_step(schedule, each, f"{name}.{index}") for index, each in enumerate(marks.steps)]
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
