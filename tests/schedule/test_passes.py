"""Each pass before and after, on a few lines written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.schedules import SEEDS, random_case, stack, stack_facts
from zeroweave.schedule import (
    PASSES,
    BucketFacts,
    Call,
    Costs,
    Facts,
    Free,
    Instruction,
    Line,
    Reduce,
    Reshard,
    Run,
    Schedule,
    Settle,
    Stage,
    Unshard,
    Update,
    Wait,
    compile_schedule,
    simulate,
)
from zeroweave.schedule.passes import free, insert, prefetch, stage


def run(*uses: int, backward: bool = False) -> Run:
    return Run(Call("f", "backward" if backward else "forward"), uses)


def use(bucket: int, backward: bool = False) -> tuple[Instruction, ...]:
    """One call, and the gather of its bucket around it."""
    return (Unshard(bucket), Wait(bucket), run(bucket, backward=backward), Reshard(bucket))


def of(*instructions: Instruction, ahead: int = 1, frees: bool = False) -> Schedule:
    buckets = tuple(BucketFacts(i, "abcd"[i], 1, True) for i in range(4))
    return Schedule(instructions, (), Facts(buckets, frozenset(), 1, ahead, False, frees))


INSERTED: dict[str, tuple[tuple[Instruction, ...], tuple[Instruction, ...] | None]] = {
    "the last block is kept between forward and backward": (
        (*use(0), *use(0, backward=True)),
        (Unshard(0), Wait(0), run(0), run(0, backward=True), Reshard(0)),
    ),
    "it looks past reductions and calls without buckets": (
        (*use(0), Settle(1), Reduce(2), run(), *use(0)),
        (Unshard(0), Wait(0), run(0), Settle(1), Reduce(2), run(), run(0), Reshard(0)),
    ),
    "a bucket that another call follows is dropped": ((*use(0), *use(1), *use(0)), None),
    "of several buckets the common one is kept": (
        (
            *(Unshard(0), Unshard(1), Wait(0), Wait(1), run(0, 1), Reshard(0), Reshard(1)),
            *(Unshard(1), Unshard(2), Wait(1), Wait(2), run(1, 2), Reshard(1), Reshard(2)),
        ),
        (
            *(Unshard(0), Unshard(1), Wait(0), Wait(1), run(0, 1), Reshard(0)),
            *(Unshard(2), Wait(2), run(1, 2), Reshard(1), Reshard(2)),
        ),
    ),
}
"""Instructions, and what `insert` makes of them; None: nothing."""


@pytest.mark.parametrize("name", INSERTED)
def test_insert(name: str) -> None:
    before, after = INSERTED[name]
    schedule = of(*before)
    made = insert(schedule)
    assert made is schedule if after is None else made.instructions == after


PLAIN = (*use(0), *use(1), *use(2))
HELD = (Unshard(0), Wait(0), run(0), run(1), Unshard(0), Wait(0), run(0, 2), Reshard(0), Reshard(0))
PREFETCHED: dict[str, tuple[int, tuple[Instruction, ...], tuple[Instruction, ...] | None]] = {
    "one call ahead": (
        1,
        PLAIN,
        (
            *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
            *(Unshard(2), Wait(1), run(1), Reshard(1)),
            *(Wait(2), run(2), Reshard(2)),
        ),
    ),
    "two calls ahead": (
        2,
        PLAIN,
        (
            *(Unshard(0), Unshard(1), Unshard(2), Wait(0), run(0), Reshard(0)),
            *(Wait(1), run(1), Reshard(1)),
            *(Wait(2), run(2), Reshard(2)),
        ),
    ),
    "nothing ahead": (0, PLAIN, None),
    "below the last reshard of the bucket": (
        3,
        (*use(0), *use(1), *use(0)),
        (
            *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
            *(Unshard(0), Wait(1), run(1), Reshard(1)),
            *(Wait(0), run(0), Reshard(0)),
        ),
    ),
    "below updates": (1, (*use(0), Update(0), *use(1)), None),
    "after the reduction of the call before": (
        1,
        (*use(2, True), Reduce(2), *use(1, True), Settle(2), Reduce(1), *use(0, True)),
        (
            *(Unshard(2), Unshard(1), Wait(2), run(2, backward=True), Reshard(2), Reduce(2)),
            *(Unshard(0), Wait(1), run(1, backward=True), Reshard(1), Settle(2), Reduce(1)),
            *(Wait(0), run(0, backward=True), Reshard(0)),
        ),
    ),
    "a stretch of calls on one bucket counts once": (
        1,
        (*use(0), Unshard(1), Wait(1), run(1), run(), run(1), Reshard(1), *use(2)),
        (
            *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
            *(Unshard(2), Wait(1), run(1), run(), run(1), Reshard(1)),
            *(Wait(2), run(2), Reshard(2)),
        ),
    ),
    "the turn to the backward counts": (
        1,
        (*use(1), Unshard(2), Wait(2), run(2), run(2, backward=True), Reshard(2), *use(1, True)),
        (
            *(Unshard(1), Unshard(2), Wait(1), run(1), Reshard(1)),
            *(Wait(2), run(2), Unshard(1), run(2, backward=True), Reshard(2)),
            *(Wait(1), run(1, backward=True), Reshard(1)),
        ),
    ),
    "second holds stay where they are": (1, HELD, None),
}
"""How many calls ahead, instructions, and what `prefetch` makes of them; None: nothing."""


@pytest.mark.parametrize("name", PREFETCHED)
def test_prefetch(name: str) -> None:
    ahead, before, after = PREFETCHED[name]
    schedule = of(*before, ahead=ahead)
    made = prefetch(schedule)
    assert made is schedule if after is None else made.instructions == after
    assert prefetch(made) is made, "twice is once"


def test_all_passes_keep_a_bucket_that_prefetch_would_gather_as_it_is_dropped() -> None:
    schedule = of(*use(0), *use(1), *use(0))
    for improve in PASSES:
        schedule = improve(schedule)
    assert schedule.instructions == (
        *(Unshard(0), Unshard(1), Wait(0), run(0)),
        *(Wait(1), run(1), Reshard(1)),
        *(run(0), Reshard(0)),
    )


def test_free_stands_before_the_first_update() -> None:
    step = (*use(0), Reduce(0), Reduce(1), Settle(0))
    update = (Update(0), Settle(1), Update(1))
    after = free(of(*step, *update, frees=True))
    assert after.instructions == (*step, Free(), *update)
    assert after.text().splitlines()[-2:] == ["Settle a · Free · Update a", "Settle b · Update b"]
    assert after.of("a")[-1] == "Settle a · Free · Update a"
    assert free(after) == after
    for unchanged in (of(*step, *update), of(*step, frees=True)):
        assert free(unchanged) is unchanged


# ---------------------------------------------------------------------- copies for checkpoints
def staged_of(blocks: int, wanted: bool = True, calls: int = 1) -> Schedule:
    return compile_schedule(stack(blocks, 1, calls), replace(stack_facts(blocks, 1), stage=wanted))


def shown(schedule: Schedule) -> list[str]:
    return [schedule.describe(i) for i in schedule.instructions if isinstance(i, Stage | Run | Update)]


def test_stage_comes_before_the_update_and_that_of_the_first_update_first() -> None:
    assert shown(staged_of(2)) == [
        "Stage layers.1",
        "Run layers.0.0 forward [layers.0]",
        "Stage layers.0",
        "Run layers.1.0 forward [layers.1]",
        "Run layers.1.0 backward [layers.1]",
        "Run layers.0.0 backward [layers.0]",
        "Update layers.1",
        "Update layers.0",
    ]


def test_stages_of_few_buckets_are_spread_over_the_first_forward() -> None:
    record = stack(2, 3, 4)
    schedule = compile_schedule(record, replace(stack_facts(2, 1), stage=True))
    lines = [i for i in schedule.instructions if isinstance(i, Stage | Run)]
    assert [n for n, i in enumerate(lines) if isinstance(i, Stage)] == [0, 5]


def test_stages_of_many_buckets_share_the_calls() -> None:
    facts = replace(stack_facts(6, 1), stage=True)
    record = tuple(e for e in stack(6, 1, 1) if getattr(e, "call", Call("layers.0.0", "forward")).name == "layers.0.0")
    schedule = compile_schedule(record, facts)
    runs = [n for n, i in enumerate(schedule.instructions) if isinstance(i, Run)]
    assert max(n for n, i in enumerate(schedule.instructions) if isinstance(i, Stage)) < runs[0]


def test_nothing_is_staged_where_nothing_asks_for_it() -> None:
    plain = staged_of(3, wanted=False)
    assert stage(plain) is plain and not any(isinstance(i, Stage) for i in plain.instructions)


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_stages_leave_random_schedules_as_they_are_otherwise(seed: int) -> None:
    record, facts = random_case(seed)
    plain, staged = compile_schedule(record, facts), compile_schedule(record, replace(facts, stage=True))
    assert tuple(i for i in staged.instructions if not isinstance(i, Stage)) == plain.instructions
    assert sorted(i.bucket for i in staged.instructions if isinstance(i, Stage)) == sorted(facts.by_id)
    assert stage(staged) is staged


def test_stages_take_no_time_that_is_predicted() -> None:
    plain, staged = staged_of(3, wanted=False), staged_of(3)
    events = sum(isinstance(i, Run) for i in plain.instructions) + 3
    line = Line(1.0, 0.5)
    costs = Costs((1.0,) * events, dict.fromkeys(range(3), 0.25), {}, {}, line, line, (0,) * events)
    assert simulate(staged, costs).seconds == simulate(plain, costs).seconds
