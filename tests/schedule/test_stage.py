"""Copies for checkpoints: where the pass puts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.schedules import SEEDS, random_case, stack, stack_facts
from zeroweave.schedule import Call, Costs, Line, Run, Schedule, Stage, Update, compile_schedule, simulate
from zeroweave.schedule.passes import stage


def of(blocks: int, wanted: bool = True, calls: int = 1) -> Schedule:
    return compile_schedule(stack(blocks, 1, calls), replace(stack_facts(blocks, 1), stage=wanted))


def shown(schedule: Schedule) -> list[str]:
    return [schedule.describe(i) for i in schedule.instructions if isinstance(i, Stage | Run | Update)]


def test_a_bucket_is_staged_before_it_is_updated_and_the_first_update_comes_first() -> None:
    assert shown(of(2)) == [
        "Stage layers.1",
        "Run layers.0.0 forward [layers.0]",
        "Stage layers.0",
        "Run layers.1.0 forward [layers.1]",
        "Run layers.1.0 backward [layers.1]",
        "Run layers.0.0 backward [layers.0]",
        "Update layers.1",
        "Update layers.0",
    ]


def test_few_buckets_are_spread_over_the_first_forward() -> None:
    record = stack(2, 3, 4)
    schedule = compile_schedule(record, replace(stack_facts(2, 1), stage=True))
    lines = [i for i in schedule.instructions if isinstance(i, Stage | Run)]
    assert [n for n, i in enumerate(lines) if isinstance(i, Stage)] == [0, 5]


def test_many_buckets_share_the_calls() -> None:
    facts = replace(stack_facts(6, 1), stage=True)
    record = tuple(e for e in stack(6, 1, 1) if getattr(e, "call", Call("layers.0.0", "forward")).name == "layers.0.0")
    schedule = compile_schedule(record, facts)
    runs = [n for n, i in enumerate(schedule.instructions) if isinstance(i, Run)]
    assert max(n for n, i in enumerate(schedule.instructions) if isinstance(i, Stage)) < runs[0]


def test_nothing_is_staged_where_nothing_asks_for_it() -> None:
    plain = of(3, wanted=False)
    assert stage(plain) is plain and not any(isinstance(i, Stage) for i in plain.instructions)


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_random_schedules_stay_as_they_are_otherwise(seed: int) -> None:
    record, facts = random_case(seed)
    plain, staged = compile_schedule(record, facts), compile_schedule(record, replace(facts, stage=True))
    assert tuple(i for i in staged.instructions if not isinstance(i, Stage)) == plain.instructions
    assert sorted(i.bucket for i in staged.instructions if isinstance(i, Stage)) == sorted(facts.by_id)
    assert stage(staged) is staged


def test_it_takes_no_time_that_is_predicted() -> None:
    plain, staged = of(3, wanted=False), of(3)
    events = sum(isinstance(i, Run) for i in plain.instructions) + 3
    line = Line(1.0, 0.5)
    costs = Costs((1.0,) * events, dict.fromkeys(range(3), 0.25), {}, {}, line, line, (0,) * events)
    assert simulate(staged, costs).seconds == simulate(plain, costs).seconds
