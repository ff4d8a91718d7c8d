"""What is free is filled by default, as far as all ranks have it; where steps grow, all fill less at the same step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.memory import CountedClock, counted
from tests.support.parity import digest
from tests.support.zoo import Block, regression, rows, stack_of

pytestmark = pytest.mark.matrix

BLOCKS = 10
ACTIVATION = 600
"""bytes that each block leaves for its backward"""
PLENTY = 10_000_000


@contextmanager
def training(size: int, **settings: Any) -> Iterator[tuple[Any, CountedClock, Callable[..., str]]]:
    """An engine on a device of so many bytes, its clock, and a function that trains a step and hashes gradients.

    Its arguments: so many bytes are in use at the end of the forward, at least; so often the allocator tries again.
    Ranks are late at random.
    """
    torch.manual_seed(7)
    module = stack_of(Block, BLOCKS)()
    config = {
        "stage": 3,
        "deadline_seconds": 200.0,
        "compile": {"enabled": False, "record_steps": 1, **settings},
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    with counted(size) as clock, zw.initialize(module, optimizer, config) as engine:
        clock.attach(engine)
        late, top = random.Random(engine.rank), [0, 0]

        def leaves(block: nn.Module, args: Any) -> None:
            clock.add(ACTIVATION)
            time.sleep(late.random() * 2e-3)

        for block in module.blocks:
            block.register_forward_pre_hook(leaves)

        def ends(block: nn.Module, args: Any) -> None:
            clock.add(max(0, top[0] - clock.take_used()[0]))
            clock.refused += top[1]

        module.leave.register_forward_pre_hook(ends)

        def step(most: int = 0, refused: int = 0) -> str:
            top[:] = most, refused
            regression(engine, module, rows(engine.rank, engine.micro_steps), engine.backward)
            found = "" if engine._context.transport.skips else digest([engine.gradients()])
            engine.step()
            clock.add(-clock.added)
            return found

        yield engine, clock, step


def kept(engine: Any) -> tuple[int, ...]:
    """The buckets that the next step gathers once."""
    gathers = [bucket for kind, bucket in engine.schedule.collectives() if kind == "all_gather"]
    return tuple(sorted(bucket for bucket in set(gathers) if gathers.count(bucket) == 1))


class Course(NamedTuple):
    """Of each step: what the next one keeps, and the schedule's fingerprint; were all gradients those of the plain
    schedule? Departures, and what the log was told of memory."""

    kept: list[tuple[int, ...]]
    fingerprints: list[int]
    same: bool
    departures: int
    told: list[str]


def course(sizes: tuple[int, int], most: list[tuple[int, int]], settings: dict[str, Any]) -> Course:
    """Trains steps that take so many bytes, by rank, beside an engine that keeps nothing."""
    found, prints, same, told = [], [], True, []
    rank = torch.distributed.get_rank()
    with (
        training(PLENTY, prefetch=0, keep="none") as (_, _, plain),
        training(sizes[rank], **settings) as (engine, _, step),
    ):
        for each in most:
            same &= step(each[rank]) == plain()
            found.append(kept(engine))
            prints.append(engine.schedule.fingerprint)
            told += [each.reason for each in engine._context.journal.take() if "memory" in each.reason]
        return Course(found, prints, same, engine.stats.departures, told)


USUAL = [(0, 0)] * 4
ALL = set(range(BLOCKS + 2))
SMALL = 78_000
"""Bytes of a device that has room for some buckets more and not for all."""
NEAR, OVER = (0, SMALL * 95 // 100), (0, SMALL * 95 // 100 + 1)
"""As much as rank 1 may take, and a byte more."""


def shrinks(settings: dict[str, Any], pools: Pools) -> None:
    one, other = pools(2).run(course, (PLENTY, SMALL), [*USUAL, NEAR, NEAR, OVER, OVER, (0, 0), OVER], settings)
    assert one.kept == other.kept and one.fingerprints == other.fingerprints
    assert one.same and other.same, "numbers are those of a schedule that keeps nothing"
    before, after = one.kept[3], one.kept[-1]
    assert set(one.kept[1]) < set(before) < ALL, "less than rank 0 has room for"
    assert one.kept[3:6] == [before] * 3, "what just fits changes nothing"
    assert one.kept[6:] == [after] * 4 and set(one.kept[1]) < set(after), "once, and then it is enough"
    assert len(after) < len(before)
    assert len(one.told) == len(other.told) == 1 and "memory is short" in one.told[0]
    assert one.departures == other.departures == 0


def test_growth_on_one_rank_shrinks_all_at_the_same_step(pools: Pools) -> None:
    shrinks({}, pools)


def test_compiled_steps_shrink_without_compiling(pools: Pools) -> None:
    shrinks({"enabled": True, "lower": "aot_eager"}, pools)


def refused() -> list[int]:
    """How many buckets are kept while one rank's device has nothing left at times, and the allocator tries again."""
    with training(SMALL) as (engine, _, step):
        counts = []
        for index in range(9):
            step(refused=index in (5, 7) and engine.rank == 0)
            counts.append(len(kept(engine)))
        return counts


def test_an_allocator_that_had_to_try_again_is_reason_enough(pools: Pools) -> None:
    one, other = pools(2).run(refused)
    assert one == other
    assert one[3] == one[4] > one[5] == one[6] > one[7] == one[8]


def alternating(seed: int) -> tuple[list[int], list[int]]:
    """Fingerprints after windows of one backward or two, in any order, while either rank's allocator tries again."""
    with training(SMALL) as (engine, _, step):
        both, mine, prints, counts = random.Random(seed), random.Random(f"{seed} {engine.rank}"), [], []
        for _ in range(40):
            if both.random() < 0.5:
                regression(engine, engine.module, rows(engine.rank, engine.micro_steps), engine.backward)
            step(refused=mine.random() < 0.1)
            prints.append(0 if engine.schedule is None else engine.schedule.fingerprint)
            counts.append(len(kept(engine)))
        return prints, counts


@pytest.mark.parametrize("seed", range(3))
def test_kinds_that_come_in_any_order_shrink_alike_on_all_ranks(pools: Pools, seed: int) -> None:
    one, other = pools(2).run(alternating, seed)
    assert one == other
    assert max(one[1]) > one[1][-1], "a few times, and then it is as without a budget"


def asked() -> list[tuple[int, int | None]]:
    """Buckets that are kept, and the budget, by what is asked for."""
    with training(SMALL) as (engine, clock, step):
        found = []

        def note() -> None:
            step()
            found.append((len(kept(engine)), engine.schedule.facts.memory))

        for _ in range(4):
            note()
        for most in ("none", "auto", 0, "auto"):
            engine.reschedule(memory_budget=most)
            note()
        with engine.profiling():  # takes what no step takes
            clock.add(1_000_000)
            step()
        note()
        with engine.full_parameters():
            pass
        engine.eval()
        with torch.no_grad():
            engine(rows(engine.rank, 0)[0])
        engine.train()
        note()
        with engine.record() as recorded:
            step()
        plan = engine.compile_schedule(recorded.operations, memory_budget="auto")
        assert recorded.operations.costs.room == SMALL
        with plan.execute():
            note()
        note()
        return found


def test_budgets_that_are_asked_for(pools: Pools) -> None:
    one, other = pools(2).run(asked)
    assert one == other
    auto, none = one[3], one[4]
    assert none[0] < auto[0] and none[1] is None
    assert one[5] == auto and one[6][0] <= none[0] and one[7] == auto
    assert one[8] == auto, "what is only tried out tells nothing"
    assert one[9] == auto and one[11] == auto


def uncounted() -> tuple[Any, ...]:
    """An engine where nobody counts memory."""
    torch.manual_seed(7)
    module = stack_of(Block, BLOCKS)()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found = []
    for budget in ("auto", "none", None):
        # As far ahead as times ask for, a gather may meet the drop before it, and then that bucket is held as well.
        compile_ = {"enabled": False, "record_steps": 1, "prefetch": 1, "memory_budget": budget}
        with zw.initialize(module, optimizer, {"stage": 3, "compile": compile_}) as engine:
            for index in range(5):
                regression(engine, module, rows(engine.rank, index), engine.backward)
                engine.step()
            found.append((engine.schedule.facts.memory, engine.schedule.facts.keep, kept(engine)))
    return tuple(found)


def test_without_a_count_there_is_no_budget(pools: Pools) -> None:
    ends = 0, BLOCKS + 1  # whose uses follow each other at once
    for found in pools(2).run(uncounted):
        assert set(found) == {(None, frozenset(), ends)}
