"""The lanes of a step, what its time goes to, and the geometry of drawings."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.report.runs import schedule_of
from tests.schedule.measured import with_costs
from tests.support.schedules import random_case
from zeroweave.report.course import NAMES, lanes, predicted, shares
from zeroweave.report.page import curve, ticks
from zeroweave.schedule import Update, compile_schedule


@pytest.mark.parametrize("seed", range(20))
def test_slices_are_the_spans_and_the_waits_of_a_course_and_do_not_overlap(seed: int) -> None:
    schedule = with_costs(compile_schedule(*random_case(seed)), seed)
    assert schedule.costs is not None
    course = predicted(schedule, schedule.costs)
    found = lanes(schedule, course)
    slices = [each for lane in found for each in lane.slices]
    assert len(slices) == sum(span.stop > span.start for span in course.spans) + len(course.waits)
    assert sum(each.seconds for each in slices if each.kind == "wait") == pytest.approx(course.exposed)
    for lane in found:
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(lane.slices))
    assert sum(shares(schedule, course).values()) == pytest.approx(course.seconds)


def test_a_step_with_something_in_each_lane() -> None:
    schedule = schedule_of(4, 2)
    assert schedule.costs is not None
    course = predicted(schedule, schedule.costs)
    found = {lane.name: lane.slices for lane in lanes(schedule, course)}
    assert list(found) == list(NAMES.values())
    assert {each.kind for each in found["computation"]} == {"forward", "backward", "other", "wait"}
    assert all(isinstance(schedule.instructions[each.index], Update) for each in found["updates"])
    assert len(found["updates"]) == 4 and found["updates"][0].what.startswith("Update layers.")
    gathers = [each.what for each in found["gathers"]]
    assert gathers[0] == "Unshard layers.0" and len(gathers) == len(schedule.gathers)
    parts = shares(schedule, course)
    assert parts["update"] == pytest.approx(sum(schedule.costs.update.values()))
    waits = parts["gather"] + parts["reduce"] + parts["copy"]
    assert waits == pytest.approx(course.exposed) and parts["copy"] > 0 and parts["gather"] > 0


@pytest.mark.parametrize("seconds", [1e-7, 0.0031, 0.04, 0.9999, 1.0, 7.3, 1234.5])
@pytest.mark.parametrize("most", [8, 40])
def test_moments_of_a_time_axis_are_round_and_not_too_many(seconds: float, most: int) -> None:
    found = ticks(seconds, most)
    assert found[0] == 0.0 and most / 4 <= len(found) <= most + 1 and found[-1] <= seconds * (1 + 1e-6)
    digits = f"{found[1]:.3e}"
    assert digits[0] in "125" and digits[2:5] == "000"


def test_the_time_axis_of_no_time() -> None:
    assert ticks(0.0, 8) == [0.0]


def test_curves() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (4.0, 0.0)]
    assert curve(points, 4.0, 2.0, steps=True) == "M0 50H250V0H1000V100"
    assert curve(points, 4.0, 2.0, steps=False) == "M0 50L250 0L1000 100"
    assert curve([(0.0, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 1.0)], 4.0, 2.0, steps=True) == "M0 50H250H250V0H250V50"
    assert curve([], 1.0, 1.0, steps=True) == ""
    assert curve([(0.0, 0.0)], 0.0, 0.0, steps=False) == "M0 100"
