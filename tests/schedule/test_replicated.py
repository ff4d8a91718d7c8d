"""Schedules of replicated buckets: what crosses sharding groups, once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.schedules import SEEDS, random_case, stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    Costs,
    End,
    GatherAcross,
    Instruction,
    Line,
    Reduce,
    ReduceAcross,
    Run,
    Schedule,
    Settle,
    Update,
    compile_schedule,
    simulate,
    verify,
)


def replicated(blocks: int = 2, micro_steps: int = 2, by_bucket: bool = False) -> Schedule:
    facts = stack_facts(blocks, 1)
    trained = frozenset(bucket.id for bucket in facts.buckets if bucket.trainable)
    facts = replace(facts, replicated=trained, update_by_bucket=by_bucket)
    return compile_schedule(stack(blocks, micro_steps, 1), facts)


def place(schedule: Schedule, instruction: Instruction, which: int = -1) -> int:
    return [index for index, each in enumerate(schedule.instructions) if each == instruction][which]


@pytest.mark.parametrize("by_bucket", [False, True])
def test_what_crosses_groups_crosses_once_behind_the_last_micro_step(by_bucket: bool) -> None:
    schedule = replicated(by_bucket=by_bucket)
    for bucket in schedule.facts.replicated:
        across = place(schedule, ReduceAcross(bucket))
        assert schedule.instructions.count(ReduceAcross(bucket)) == 1
        assert schedule.instructions[across - 1] == Settle(bucket)
        assert place(schedule, Reduce(bucket)) < across < place(schedule, Settle(bucket))
        assert place(schedule, Settle(bucket)) < place(schedule, Update(bucket))
        assert schedule.instructions.count(GatherAcross(bucket)) == 1
    updates = [index for index, each in enumerate(schedule.instructions) if isinstance(each, Update)]
    gathers = [each.bucket for each in schedule.instructions[updates[-1] :] if isinstance(each, GatherAcross)]
    assert gathers == sorted(schedule.facts.replicated), "in the order of first use"


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_keep_it_right(seed: int) -> None:
    record, facts = random_case(seed)
    facts = replace(facts, replicated=frozenset(bucket.id for bucket in facts.buckets if bucket.trainable))
    schedule = compile_schedule(record, facts)
    if not schedule.instructions:
        return
    events = sum(isinstance(each, Run | End | Reduce) for each in schedule.instructions)
    times = {bucket.id: 1.0 for bucket in facts.buckets}
    line = Line(0.5, 0.1)
    costs = Costs((3.0,) * events, times, {}, {}, line, line, (0,) * events)
    measured = compile_schedule(record, replace(facts, costs=costs, prefetch="auto"))
    assert simulate(measured, costs).seconds <= simulate(schedule, costs).seconds * (1 + 1e-9)
    across = [each for each in measured.instructions if isinstance(each, ReduceAcross | GatherAcross)]
    assert len(across) == len(set(across)) == 2 * len(facts.replicated)


def without(schedule: Schedule, index: int) -> Schedule:
    return schedule.rearranged({}, {index})


def moved(schedule: Schedule, index: int, to: int) -> Schedule:
    return schedule.rearranged({to: [schedule.instructions[index]]}, {index})


def broken(what: str) -> tuple[Schedule, str]:
    schedule = replicated()
    across, gather = place(schedule, ReduceAcross(0)), place(schedule, GatherAcross(0))
    by_bucket, update = replicated(by_bucket=True), place(schedule, Update(0))
    first = next(index for index, each in enumerate(schedule.instructions) if isinstance(each, Update))
    updated = schedule.instructions[first]
    assert isinstance(updated, Update)
    of_first = place(schedule, GatherAcross(updated.bucket))
    return {
        "not reduced": (without(schedule, across), "settled without a reduction in flight"),
        "not settled": (without(by_bucket, place(by_bucket, Settle(0))), "updated before its reduction was settled"),
        "reduced too early": (moved(schedule, across, place(schedule, Reduce(0), 0) + 1), "before what was reduced"),
        "an earlier sum": (moved(schedule, across, place(schedule, Settle(0), 0) + 1), "reduced behind the reduction"),
        "reduced twice": (schedule.rearranged({update: [ReduceAcross(0)]}), "reduced across groups twice"),
        "not gathered": (without(schedule, gather), "never gathered across groups"),
        "gathered twice": (schedule.rearranged({gather: [GatherAcross(0)]}), "gathered across groups twice"),
        "gathered too early": (moved(schedule, gather, update), "gathered across groups before its update"),
        "updated behind": (moved(schedule, of_first, first + 1), "updated behind a gather across groups"),
        "not replicated": (
            replace(schedule, facts=replace(schedule.facts, replicated=schedule.facts.replicated - {0})),
            "the bucket is not replicated",
        ),
    }[what]


WHATS = (
    "not reduced",
    "not settled",
    "reduced too early",
    "an earlier sum",
    "reduced twice",
    "not gathered",
    "gathered twice",
    "gathered too early",
    "updated behind",
    "not replicated",
)


@pytest.mark.parametrize("what", WHATS)
def test_the_verifier_finds_what_is_wrong(what: str) -> None:
    schedule, told = broken(what)
    with pytest.raises(ScheduleError, match=told):
        verify(schedule)
