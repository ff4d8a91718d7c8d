"""Which buckets may be updated before their window is over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.schedule.headed import BLOCKS, WITHOUT, costs_of, made
from tests.support.marks import daily
from tests.support.schedules import SEEDS, random_case, stack, stack_facts
from zeroweave.schedule import (
    PASSES,
    Call,
    End,
    Entered,
    Left,
    Micro,
    Ready,
    Reduce,
    Regather,
    Run,
    Schedule,
    Settle,
    Unshard,
    Update,
    Wait,
    compile_schedule,
    early_updates,
)
from zeroweave.schedule.passes.heads import early as heads_of


def stacked(blocks: int, depth: int, micro_steps: int = 1) -> Schedule:
    facts = replace(stack_facts(blocks, 1), depth=depth, update_by_bucket=True)
    return compile_schedule(stack(blocks, micro_steps, calls=1), facts)


def safe(schedule: Schedule) -> set[int]:
    """Walks through a schedule: for which buckets nothing is under way, or to come, behind the last Settle?"""
    instructions = schedule.instructions
    to_come = Counter(i.bucket for i in instructions if isinstance(i, Settle))
    gathering, used = set[int](), Counter[int]()
    open_calls: dict[Call, list[tuple[int, ...]]] = {}
    found = set[int]()
    for index, instruction in enumerate(instructions):
        match instruction:
            case Unshard(bucket) if not any(
                isinstance(i, Unshard) and i.bucket == bucket for i in instructions[:index]
            ):
                gathering.add(bucket)
                found.discard(bucket)
            case Unshard(bucket) | Reduce(bucket):
                found.discard(bucket)
            case Wait(bucket):
                gathering.discard(bucket)
                found.discard(bucket)
            case Run(call, uses):
                found.difference_update(uses)
                if index in schedule.lasting:
                    open_calls.setdefault(call, []).append(uses)
                    used.update(uses)
            case End(call):
                used.subtract(open_calls[call].pop())
            case Settle(bucket):
                to_come[bucket] -= 1
                if not to_come[bucket] and bucket not in gathering and not used[bucket]:
                    found.add(bucket)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_gathers_uses_or_reduces_them_behind_their_last_settle(seed: int) -> None:
    record, facts = random_case(seed)
    schedule = compile_schedule(record, replace(facts, update_by_bucket=True))
    early = early_updates(schedule)
    assert early == safe(schedule)
    assert all(facts.by_id[bucket].trainable for bucket in early)
    assert not early_updates(compile_schedule(record, replace(facts, update_by_bucket=False)))


def test_the_buckets_of_a_stack_all_may() -> None:
    for micro_steps in (1, 3):
        schedule = stacked(6, 1, micro_steps)
        assert early_updates(schedule) == set(range(6))
        first = next(n for n, i in enumerate(schedule.instructions) if isinstance(i, Update))
        last_run = max(n for n, i in enumerate(schedule.instructions) if isinstance(i, Run))
        assert first > last_run  # the schedule itself has them at its end: a step may be skipped there


def test_what_a_call_uses_that_is_still_open_waits_for_the_end() -> None:
    outer = Call("outer", "backward")
    record = (
        Entered(outer, (0,)),
        Entered(Call("a", "backward"), (1,)),
        Left(Call("a", "backward")),
        Ready(1),
        Ready(0),
        Ready(2),
        Left(outer),
        Micro(),
    )
    facts = replace(stack_facts(3, 0), depth=1, update_by_bucket=True)
    assert early_updates(compile_schedule(record, facts)) == {1, 2}


def test_what_is_gathered_again_waits_for_the_end() -> None:
    last = Call("last", "backward")
    record = (*stack(3, 1, calls=1)[:-1], Entered(last, (2,)), Left(last), Micro())
    facts = replace(stack_facts(3, 0), depth=1, update_by_bucket=True)
    assert early_updates(compile_schedule(record, facts)) == {0, 1}


def test_the_last_reductions_have_updates_beside_them() -> None:
    def left(reduction: float, update: float) -> set[int]:
        costs = costs_of(reduction=reduction, update=update)
        return set(range(BLOCKS)) - early_updates(made(costs=costs, passes=WITHOUT))

    # block 0 is reduced last, behind the last call
    assert left(0.0, 1.0) == set()
    assert left(0.9, 1.0) == {1}
    assert left(0.4, 1.0) == set()  # more than half of it would come behind
    assert left(0.9, 0.5) == {1, 2}
    assert left(0.9, 0.3) == {1, 2, 3}
    assert left(0.9, 0.0) == set()  # nobody knows what they take


def test_the_last_gathers_have_updates_beside_them() -> None:
    """Block 0 is reduced, updated and gathered behind the last call; the others are updated behind it, or before."""

    def left(gather: float, update: float, reduction: float = 0.0, placed: bool = False) -> set[int]:
        costs = costs_of(gather, reduction, update)
        places = frozenset(range(BLOCKS) if placed else ())
        schedule = heads_of(made(costs=costs, passes=WITHOUT, placed=places), [0], costs)
        found = set(range(BLOCKS)) - early_updates(schedule)
        behind = schedule.instructions[schedule.instructions.index(Regather(0)) :]
        assert reduction or found - {0} <= {i.bucket for i in behind if isinstance(i, Update)}
        return found

    assert left(0.9, 1.0) == {1}
    assert left(0.4, 1.0) == set()  # more than half of it would come behind
    assert left(0.9, 0.5) == {1, 2}
    assert left(0.9, 0.3) == {1, 2, 3}
    assert left(0.9, 0.3, placed=True) == {1, 2, 3}


def test_a_gather_waits_for_the_lane() -> None:
    """The last reduction is over behind the head's update, and its gather runs behind that if it goes by kernel."""
    costs = replace(costs_of(3.0, 1.0, 1.0), update={**costs_of().update, 0: 0.05})
    schedule = heads_of(made(costs=costs, passes=WITHOUT), [1], costs)
    assert early_updates(schedule) == {0, 1}
    placed = heads_of(made(costs=costs, passes=WITHOUT, placed=frozenset(range(BLOCKS))), [1], costs)
    assert placed.instructions == schedule.instructions and early_updates(placed) == {0, 1, 5}


@daily("reduction", [0.9, 4.0], [0.5, 2.5])
@daily("update", [0.3, 1.0], [3.0])
@pytest.mark.parametrize("passes", [WITHOUT, PASSES])
def test_what_is_left_is_updated_beside_a_collective_that_is_waited_for(
    reduction: float, update: float, passes: Any
) -> None:
    costs = costs_of(reduction=reduction, update=update)
    schedule = made(costs=costs, passes=passes)
    instructions = schedule.instructions
    last_event = max(n for n, i in enumerate(instructions) if isinstance(i, Run | End | Reduce))
    settles = {i.bucket: n for n, i in enumerate(instructions) if isinstance(i, Settle)}
    early = early_updates(schedule)
    left = [
        (n, i.bucket)
        for n, i in enumerate(instructions)
        if isinstance(i, Update) and i.bucket not in early and settles[i.bucket] < last_event
    ]
    last_settle = max(settles.values())
    last_gather = max((n for n, i in enumerate(instructions) if isinstance(i, Regather)), default=len(instructions))
    assert all(last_event < n and (n < last_settle or n > last_gather) for n, _ in left)
