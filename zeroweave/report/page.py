"""`zeroweave report`: a run as one page of HTML that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from zeroweave.engine.samples import About
from zeroweave.report import sections
from zeroweave.report.course import Courses, farthest, lanes, shares
from zeroweave.report.tables import size

KINDS: Final = {
    "forward": "forward",
    "backward": "backward",
    "other": "other computation",
    "update": "update",
    "gather": "gather",
    "reduce": "reduction",
    "copy": "copy of activations",
    "wait": "computation stands still",
}
"""Kinds of slices, as the legend has them."""
SHARES: Final = {
    "forward": "forward",
    "backward": "backward",
    "other": "other computation",
    "update": "updates",
    "gather": "waits for gathers",
    "reduce": "waits for reductions",
    "copy": "waits for copies",
    "rest": "the rest",
}
LEVELS: Final = 8, 40, 200
"""The most round moments that the time axis names, by how far it is magnified."""


def page(shown: Courses, title: str, made: datetime) -> str:
    """The page as text. It is to be written in UTF-8. It names the parts that are missing."""
    environment = Environment(
        loader=PackageLoader("zeroweave.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ms": sections.ms, "size": size, "share": lambda part: f"{100 * part:.3f}%"}
    about = shown.about
    values: dict[str, Any] = {
        "title": title,
        "made": made.strftime("%Y-%m-%d %H:%M %Z"),
        "shown": shown,
        "about": about,
        "kinds": KINDS,
        "sections": sections,
        "curves": [] if about is None else _curves(about),
    }
    if shown.courses:
        values |= _of_courses(shown)
    return environment.get_template("report.html").render(values)


def _of_courses(shown: Courses) -> dict[str, Any]:
    """The parts of the page that need courses, on one time axis for all."""
    schedule = shown.schedule
    first, *rest = shown.courses
    measured = (first, *shown.others) if first.name == "measured" else ()
    courses = (*measured, *(rest if measured else (first,)))
    longest = max((0.0, *(course.seconds for course in courses), *(s.stop for c in courses for s in c.spans))) or 1.0
    most = max(0, *(course.peak for course in courses))
    pictures = []
    for course in courses:
        points = [*zip(course.starts, course.memory, strict=False)]
        points += [(course.seconds, course.memory[-1])] if points else []  # memory stays to the end of the step
        memory = curve(points, longest, most, steps=True)  # "" where it is not counted
        pictures.append({"course": course, "lanes": lanes(schedule, course), "memory": memory})
    return {
        "measured": pictures[: len(measured)],
        "pictures": pictures,
        "longest": longest,
        "ticks": [ticks(longest, most) for most in LEVELS],
        "shares": [(course.name, course.seconds, shares(schedule, course)) for course in courses],
        "share_names": SHARES,
        "instructions": sections.instructions(shown, courses),
        "farthest": farthest(first, rest[0]) if rest else None,
    }


def _curves(about: About) -> list[dict[str, Any]]:
    """Values by the number of a step, times in ms, drawn from 0 to `most`. `path` leaves out what is not finite."""
    times = tuple((number, 1e3 * took) for number, took in about.seconds)
    named = (("Duration of each timed step", times, "ms"), ("Loss on this rank", about.losses, ""))
    found = []
    for name, points, unit in named:
        finite = [(number, value) for number, value in points if math.isfinite(value)]
        if not finite:
            continue
        first, last = finite[0][0], finite[-1][0]
        most = max(0.0, *(value for _, value in finite))
        shifted = [(float(number - first), value) for number, value in finite]
        path = curve(shifted, float(last - first), most, steps=False)
        found.append({"name": name, "points": points, "most": most, "path": path, "unit": unit})
    return found


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
    drawn = [(f"{1000 * x / (right or 1.0):.6g}", f"{100 - 100 * y / (top or 1.0):.5g}") for x, y in points]
    parts = [f"M{x} {y}" for x, y in drawn[:1]]
    for (_, before), (x, y) in pairwise(drawn):
        parts.append(f"H{x}" + f"V{y}" * (y != before) if steps else f"L{x} {y}")
    return "".join(parts)
