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


def replicated(
    blocks: int = 2, micro_steps: int = 2, by_bucket: bool = False, depth: int = 2, copied: bool = False
) -> Schedule:
    facts = stack_facts(blocks, 1)
    trained = frozenset(bucket.id for bucket in facts.buckets if bucket.trainable)
    spread = frozenset[int]() if copied else trained
    facts = replace(facts, replicated=trained, spread=spread, update_by_bucket=by_bucket, depth=depth)
    return compile_schedule(stack(blocks, micro_steps, 1), facts)


def place(schedule: Schedule, instruction: Instruction, which: int = -1) -> int:
    return [index for index, each in enumerate(schedule.instructions) if each == instruction][which]


@pytest.mark.parametrize("by_bucket", [False, True])
def test_what_crosses_groups_crosses_once_behind_all_reductions_in_their_order(by_bucket: bool) -> None:
    schedule = replicated(by_bucket=by_bucket)
    reduced = max(index for index, each in enumerate(schedule.instructions) if isinstance(each, Reduce))
    across = [index for index, each in enumerate(schedule.instructions) if isinstance(each, ReduceAcross)]
    assert across == list(range(across[0], across[0] + len(across))) and across[0] > reduced
    order = tuple(schedule.instructions[index] for index in across)
    assert order == tuple(map(ReduceAcross, schedule.reduce_order))
    for bucket in schedule.facts.replicated:
        assert place(schedule, ReduceAcross(bucket)) < place(schedule, Settle(bucket))
        assert place(schedule, Settle(bucket)) < place(schedule, Update(bucket))
        assert schedule.instructions.count(ReduceAcross(bucket)) == 1
        assert schedule.instructions.count(GatherAcross(bucket)) == 1
    updates = [index for index, each in enumerate(schedule.instructions) if isinstance(each, Update)]
    gathers = [each.bucket for each in schedule.instructions[updates[-1] :] if isinstance(each, GatherAcross)]
    assert gathers == sorted(schedule.facts.replicated), "in the order of the layout"
    copied = replicated(by_bucket=by_bucket, copied=True)
    assert copied.instructions == tuple(each for each in schedule.instructions if not isinstance(each, GatherAcross))


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_keep_it_right(seed: int) -> None:
    record, facts = random_case(seed)
    trained = frozenset(bucket.id for bucket in facts.buckets if bucket.trainable)
    facts = replace(facts, replicated=trained, spread=trained)
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


def broken() -> dict[str, tuple[Schedule, str]]:
    schedule, alone, by_bucket = replicated(), replicated(depth=1), replicated(by_bucket=True)
    first = schedule.reduce_order[0]
    across, gather = place(schedule, ReduceAcross(first)), place(schedule, GatherAcross(0))
    update = next(index for index, each in enumerate(schedule.instructions) if isinstance(each, Update))
    updated = schedule.instructions[update]
    assert isinstance(updated, Update)
    last = max(index for index, each in enumerate(alone.instructions) if isinstance(each, Reduce))
    return {
        "not reduced": (without(schedule, across), f"before {schedule.facts.name(first)}"),
        "not settled": (
            without(by_bucket, place(by_bucket, Settle(first))),
            "updated before its reduction was settled",
        ),
        "reduced too early": (moved(schedule, across, place(schedule, Reduce(first)) + 1), "before what was reduced"),
        "an earlier sum": (moved(alone, place(alone, ReduceAcross(first)), last), "reduced behind a reduction"),
        "another order": (moved(schedule, across, across + 2), f"before {schedule.facts.name(first)}"),
        "reduced twice": (schedule.rearranged({update: [ReduceAcross(first)]}), "reduced across groups twice"),
        "not gathered": (without(schedule, gather), "never gathered across groups"),
        "gathered twice": (schedule.rearranged({gather: [GatherAcross(0)]}), "gathered across groups twice"),
        "gathered in another order": (moved(schedule, gather + 1, gather), "comes later in the layout"),
        "gathered too early": (moved(schedule, gather, update), "gathered across groups before its update"),
        "updated behind": (
            moved(schedule, place(schedule, GatherAcross(updated.bucket)), update + 1),
            "updated behind a gather across groups",
        ),
        "not replicated": (
            replace(schedule, facts=replace(schedule.facts, replicated=frozenset())),
            "the bucket is not replicated",
        ),
    }


BROKEN = broken()


@pytest.mark.parametrize("what", BROKEN)
def test_the_verifier_finds_what_is_wrong(what: str) -> None:
    schedule, told = BROKEN[what]
    with pytest.raises(ScheduleError, match=told):
        verify(schedule)
