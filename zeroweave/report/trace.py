"""A schedule's step as a trace that Perfetto and chrome://tracing open.

The format is the JSON object format of Chrome's trace events: times in microseconds, one process for what was measured
and one for what was predicted, a thread for each lane, memory as a counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from zeroweave.report.course import Course
from zeroweave.schedule import Schedule

LANES: Final = {"compute": "compute", "all_gather": "gather", "reduce_scatter": "reduce", "copy": "copy"}
PROCESSES: Final = {"measured": 1, "predicted": 2}


def trace(schedule: Schedule, courses: tuple[Course, ...]) -> dict[str, Any]:
    """The trace as an object for `json.dump`."""
    events = [event for course in courses for event in _events(schedule, course)]
    return {"traceEvents": sorted(events, key=lambda event: event.get("ts", -1.0)), "displayTimeUnit": "ms"}


def _events(schedule: Schedule, course: Course) -> Iterator[dict[str, Any]]:
    process = PROCESSES[course.name]
    threads = {lane: number for number, lane in enumerate(LANES, 1)}

    def shown(index: int, start: float, seconds: float, lane: str, category: str) -> dict[str, Any]:
        """A complete event."""
        return {
            "ph": "X",
            "name": schedule.describe(schedule.instructions[index]),
            "cat": category,
            "pid": process,
            "tid": threads[lane],
            "ts": 1e6 * start,
            "dur": 1e6 * seconds,
            "args": {"instruction": index},
        }

    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": course.name}}
    used = {"compute", *(span.lane for span in course.spans)}
    for lane, name in LANES.items():
        if lane in used:
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": threads[lane], "args": {"name": name}}
    for span in course.spans:
        yield shown(span.index, span.start, span.stop - span.start, span.lane, span.lane)
    for index, seconds in course.waits.items():
        yield shown(index, course.starts[index], seconds, "compute", "wait")
    for start, nbytes in zip(course.starts, course.memory, strict=bool(course.memory)):
        yield {"ph": "C", "name": "memory", "pid": process, "ts": 1e6 * start, "args": {"bytes": nbytes}}
