"""A step as lanes over time: the page draws them, and Perfetto and chrome://tracing open them as a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zeroweave.report.course import Course
from zeroweave.schedule import Instruction, Run, Schedule, Settle, Span, Update, Wait

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
            times = {"ts": 1e6 * each.start, "dur": 1e6 * each.seconds}
            yield {
                "ph": "X",
                "name": each.what,
                "cat": each.kind,
                "args": {"instruction": each.index},
                **where,
                **times,
            }
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


def ticks(seconds: float, most: int) -> list[float]:
    """Round moments of a time axis from 0 to `seconds`, at equal distances: 0 and at most `most` others."""
    if seconds <= 0.0:
        return [0.0]
    rough = seconds / most
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [distance * number for number in range(math.floor(seconds / distance * (1 + 1e-9)) + 1)]


def curve(points: Sequence[tuple[float, float]], right: float, top: float, steps: bool) -> str:
    """The path of an SVG, 1000 wide and 100 high, through points from (0, 0) to (right, top).

    steps: a value holds until the next one.
    """
    if not points:
        return ""
    right, top = right or 1.0, top or 1.0

    def x(value: float) -> str:
        return f"{1000 * value / right:.2f}".rstrip("0").rstrip(".")

    def y(value: float) -> str:
        return f"{100 - 100 * value / top:.2f}".rstrip("0").rstrip(".")

    (at, value), *others = points
    last = x(at), y(value)
    parts = [f"M{last[0]} {last[1]}"]
    for at, value in others:
        now = x(at), y(value)
        if steps:  # only what changes
            if now[0] != last[0]:
                parts.append(f"H{now[0]}")
            if now[1] != last[1]:
                parts.append(f"V{now[1]}")
        else:
            parts.append(f"L{now[0]} {now[1]}")
        last = now
    return "".join(parts)
