"""Costs, and measured steps that went exactly as predicted."""

from __future__ import annotations

import random
from dataclasses import replace

from zeroweave.schedule import Costs, End, Line, Measured, Moment, Reduce, Run, Schedule, Step, Update, simulate
from zeroweave.schedule.moves import moves_of


def with_costs(schedule: Schedule, seed: int = 0) -> Schedule:
    """The schedule with random costs in its facts."""
    rng = random.Random(seed)
    events = sum(isinstance(i, Run | End | Reduce) for i in schedule.instructions)
    buckets = [bucket.id for bucket in schedule.facts.buckets]
    costs = Costs(
        compute=tuple(rng.random() for _ in range(events)),
        update={bucket: rng.random() for bucket in buckets},
        gathers={bucket: rng.random() for bucket in buckets[::2]},
        reductions={bucket: rng.random() for bucket in buckets},
        gather=Line(rng.random(), rng.random()),
        reduce=Line(),
        activations=tuple(rng.randrange(100) for _ in range(events)),
        resident=rng.randrange(1000),
        copy=Line(rng.random(), rng.random()),
        moves=moves_of(schedule.record),
    )
    return replace(schedule, facts=replace(schedule.facts, costs=costs))


def as_predicted(schedule: Schedule, before: int = 0) -> Measured:
    """A step of a schedule with costs that went as they say; `before`: bytes allocated at its start, 0: not counted."""
    costs = schedule.costs
    assert costs is not None
    course = simulate(schedule, costs)
    moments = []
    for index, (instruction, start) in enumerate(zip(schedule.instructions, course.starts, strict=True)):
        takes = course.waits.get(index, 0.0)  # the computation of an event comes after it
        if isinstance(instruction, Update):
            takes = costs.update.get(instruction.bucket, 0.0)
        allocated = before and before + course.memory[index]
        moments.append(Moment(instruction, start, start + takes, allocated))
    if moments:
        moments[-1] = replace(moments[-1], stop=course.seconds)
    collectives = [
        (span.lane, schedule.instructions[span.index].bucket, course.starts[span.index], course.over[span.index])  # type: ignore[union-attr]
        for span in course.spans
        if span.index in course.over and span.lane not in ("compute", "copy")
    ]
    copies = [(span.index, 8, span.start, span.stop) for span in course.spans if span.lane == "copy"]
    return Measured(Step.of(schedule, moments, collectives, copies), costs, {"dynamo": 1.5, "schedule": 0.25})
