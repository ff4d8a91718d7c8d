"""What follows from the marks of a measured step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.schedule.measured import as_predicted, with_costs
from tests.support.schedules import random_case, stack, stack_facts
from zeroweave import ScheduleError
from zeroweave.report.course import measured, predicted
from zeroweave.schedule import Line, Measured, Schedule, Span, Step, build, compile_schedule, costs_of

SEEDS = range(40)


def schedule_of(seed: int) -> Schedule:
    record, facts = random_case(seed)
    return with_costs(compile_schedule(record, facts), seed)


def busy(spans: tuple[Span, ...]) -> dict[tuple[str, int], float]:
    """Seconds of each instruction on each lane."""
    seconds: dict[tuple[str, int], float] = {}
    for span in spans:
        assert span.start <= span.stop
        seconds[span.lane, span.index] = seconds.get((span.lane, span.index), 0.0) + span.stop - span.start
    return seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_that_goes_as_predicted_is_shown_as_predicted(seed: int) -> None:
    schedule = schedule_of(seed)
    assert schedule.costs is not None
    step = as_predicted(schedule, before=5000).step
    found, expected = measured(step, schedule.costs), predicted(schedule, schedule.costs)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.starts == pytest.approx(expected.starts)
    assert found.waits == pytest.approx(expected.waits)
    assert busy(found.spans) == pytest.approx(busy(expected.spans), abs=1e-12)
    assert found.takes == pytest.approx(expected.takes, abs=1e-12)
    assert found.memory == expected.memory and found.peak == expected.peak
    assert measured(as_predicted(schedule).step, schedule.costs).memory == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_costs_of_such_steps_are_what_predicted_them(seed: int) -> None:
    schedule = schedule_of(seed)
    costs = schedule.costs
    assert costs is not None
    step = as_predicted(schedule).step
    found = costs_of([step, step, step])
    assert found.compute == pytest.approx(costs.compute, abs=1e-12)
    gathered = {operation.bucket for operation in step.operations if operation.kind == "all_gather"}
    sizes = {bucket.id: bucket.nbytes for bucket in schedule.facts.buckets}
    assert found.gathers == pytest.approx({b: costs.seconds("all_gather", b, sizes[b]) for b in gathered})
    assert found.update == pytest.approx({b: costs.update[b] for b in found.update})
    assert sum(step.waits.values()) == pytest.approx(sum(each.exposed for each in step.operations))


def test_no_collectives_were_timed() -> None:
    schedule = schedule_of(0)
    step = Step.of(schedule, as_predicted(schedule).step.moments, [])
    assert step.waits == {} and {span.lane for span in step.spans} == {"compute"}


def test_a_file_tells_what_was_measured(tmp_path: Path) -> None:
    record = stack(6, micro_steps=2, calls=1)
    facts = stack_facts(6, prefetch=2)
    costs = with_costs(build(record, facts)).costs
    assert costs is not None
    facts = replace(facts, costs=replace(costs, gather=Line(2.0, 1e-3), gathers={}))
    found = as_predicted(compile_schedule(record, facts))
    found.save(tmp_path / "rank0.json")
    loaded = Measured.load(tmp_path / "rank0.json")
    assert loaded is not None
    assert (loaded.step.operations, loaded.step.waits) == (found.step.operations, found.step.waits)


def test_further_steps_and_words_lie_in_the_file(tmp_path: Path) -> None:
    found = as_predicted(schedule_of(1))
    slower = replace(found.step, moments=tuple(replace(each, stop=each.stop + 1.0) for each in found.step.moments))
    told = replace(found, others=(slower, found.step), about={"rank": 3, "names": ["a"]})
    path = tmp_path / "rank0.json"
    told.save(path)
    loaded = Measured.load(path)
    assert loaded is not None and loaded.about == told.about
    assert [each.moments for each in loaded.others] == [each.moments for each in told.others]
    found.save(path)
    loaded = Measured.load(path)
    assert loaded is not None and (loaded.others, loaded.about) == ((), None)
    saved = json.loads(path.read_text())
    saved["measured"]["steps"].append({"moments": [], "collectives": [], "copies": []})
    path.write_text(json.dumps(saved))
    with pytest.raises(ScheduleError, match=r"rank0\.json: measured\.steps\.1\.moments: 0 for \d+ instructions"):
        Measured.load(path)
