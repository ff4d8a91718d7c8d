"""`zeroweave schedule`: a schedule with the times of its instructions, as text."""

from __future__ import annotations

from collections.abc import Iterator

from zeroweave.report.course import Courses, farthest
from zeroweave.report.sections import instructions, ms
from zeroweave.report.tables import size, table, tables


def report(shown: Courses) -> Iterator[str]:
    """The lines of the report, with times in milliseconds."""
    schedule, courses = shown.schedule, shown.courses
    yield f"{len(schedule.instructions)} instructions, {len(schedule.collectives())} collectives"
    shown_all, width = instructions(shown, courses), len(str(len(schedule.instructions)))
    kept = [i for i, name in enumerate(shown_all.head) if name != "memory" or any(row[i] for row in shown_all.rows)]
    rows = [[f"{row[0]:>{width}}  {row[1]}", *(row[i] for i in kept[2:])] for row in shown_all.rows]
    yield from tables([shown_all.head[i] for i in kept[1:]], rows)
    yield ""
    if not courses:
        yield "no times: nothing was measured when this schedule was made"
        return
    yield from table(("", *(course.name for course in courses)), list(_totals(shown)))
    yield "times in ms; takes: of the collective for Unshard and Reduce, of computation for the others"
    if courses[0].memory:
        yield "memory: flats, gradients in flight and activations, at most up to the next instruction"
    if len(courses) > 1 and (difference := farthest(*courses[:2])) is not None:
        index, more = difference
        which = "more" if more >= 0 else "less"
        yield f"memory differs most at {index}: {size(abs(more))} {which} {courses[0].name} than {courses[1].name}"
    if len(courses) > 1 and not shown.agreed:
        yield "predicted from the measured steps themselves: the schedule was made before anything was measured"
    if shown.seconds:
        yield "making templates and the schedule took: " + ", ".join(f"{k} {v:.3f} s" for k, v in shown.seconds.items())


def _totals(shown: Courses) -> Iterator[tuple[str, ...]]:
    yield "step", *(ms(course.seconds) for course in shown.courses)
    yield "exposed communication", *(ms(course.exposed) for course in shown.courses)
    yield "critical path", *("" if course.name == "measured" else ms(shown.longest) for course in shown.courses)
    peaks = [size(course.peak) if course.memory else "not known" for course in shown.courses]
    yield "peak of flats, gradients in flight, activations", *peaks
