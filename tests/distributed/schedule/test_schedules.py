"""Whatever the schedule, the numbers are the same: all settings, and random legal schedules, against the plain one.

Two engines train side by side, one of them always by the plain schedule, so that no value is that of an earlier step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.cases import covering
from tests.schedule.shuffle import shuffled
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.parity import digest
from tests.support.reference import SEED, draw
from tests.support.zoo import Block, regression, rows, stack_of
from zeroweave.engine.scheduler import Plan

pytestmark = pytest.mark.matrix

BLOCKS = 6
BUDGET = 20_000
"""bytes that "memory" lets flats and gradient flats take: five blocks of some 4 kB"""
PREFETCH = (0, 1, 2, "memory")
KEEP = ("none", "half", "all")
DEPTH = (1, 2, 4)
ALL = list(itertools.product(PREFETCH, KEEP, DEPTH))
SOME = covering([PREFETCH, KEEP, DEPTH])
Row = tuple[Any, ...]


@contextmanager
def training(stage: int, mode: str, gas: int) -> Iterator[tuple[Any, Callable[[], str]]]:
    """An engine by the plain schedule, and a function that trains a step and hashes its gradients."""
    torch.manual_seed(SEED)
    module = stack_of(Block, BLOCKS)()
    config = {
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "deadline_seconds": 200.0,
        "compile": {**MODES[mode], "prefetch": 0, "keep": "none"},
    }
    with zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), config) as engine:

        def step() -> str:
            for _ in range(gas):
                index = engine.micro_steps
                draw(engine.rank, index)
                regression(engine, module, rows(engine.rank, index), engine.backward)
                if engine.is_gradient_accumulation_boundary():
                    found = digest([engine.gradients()])
                engine.step()
            return found

        yield engine, step


def settings_of(row: Row, operations: Any) -> dict[str, Any]:
    """Arguments of `compile_schedule`."""
    prefetch, keep, depth = row
    names = [bucket.name for bucket in operations.schedule.facts.buckets]
    wanted: dict[str, Any] = {"keep": names[::2] if keep == "half" else keep, "depth": depth}
    if prefetch == "memory":
        return wanted | {"prefetch_ahead": "auto", "memory_budget": BUDGET}
    return wanted | {"prefetch_ahead": prefetch}


def run_settings(stage: int, mode: str, gas: int, wanted: list[Row]) -> tuple[list[Row], int, int]:
    """The rows whose gradients differ from the plain schedule's, different schedules, and departures."""
    with training(stage, mode, gas) as (_, plain), training(stage, mode, gas) as (engine, step):
        numbers = {plain(): step() for _ in range(2)}
        with engine.record() as recorded:
            numbers[plain()] = step()
        assert all(expected == found for expected, found in numbers.items()) and len(numbers) == 3
        wrong, seen = [], set()
        for row in wanted:
            plan = engine.compile_schedule(recorded.operations, **settings_of(row, recorded.operations))
            with plan.execute():
                found = step()
            if found != plain() or engine.executed != plan.schedule.instructions:
                wrong.append(row)
            seen.add(plan.schedule.instructions)
        return wrong, len(seen), engine.stats.departures


def check_settings(pools: Pools, stage: int, mode: str, gas: int, wanted: list[Row]) -> None:
    for wrong, schedules, departures in pools(2).run(run_settings, stage, mode, gas, wanted):
        assert not wrong
        assert departures == 0
        assert schedules >= (8 if stage == 3 else 3)


@pytest.mark.parametrize(("stage", "mode", "gas"), [(1, "eager", 2), (2, "aot_eager", 1), (3, "aot_eager", 2)])
def test_settings_that_cover_all_pairs(pools: Pools, stage: int, mode: str, gas: int) -> None:
    check_settings(pools, stage, mode, gas, SOME)


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_settings(pools: Pools, stage: int, mode: str, gas: int) -> None:
    check_settings(pools, stage, mode, gas, ALL)


def run_shuffled(stage: int, mode: str, gas: int, seeds: range) -> tuple[list[int], set[int], int]:
    """The seeds of random schedules with other gradients than the plain one's, the fingerprints, and departures."""
    with training(stage, mode, gas) as (_, plain), training(stage, mode, gas) as (engine, step):
        assert [plain() == step() for _ in range(2)] == [True, True]
        with engine.record() as recorded:
            assert plain() == step()
        operations, scheduler = recorded.operations, engine._scheduler
        wrong, fingerprints = [], set()
        for seed in seeds:
            made = shuffled(operations.schedule, operations.costs, random.Random(seed))
            engine.use(Plan(scheduler, engine._guard, made, scheduler.settings, operations.schedule))
            if step() != plain() or engine.executed != made.instructions:
                wrong.append(seed)
            fingerprints.add(made.fingerprint)
        return wrong, fingerprints, engine.stats.departures


def check_shuffled(pools: Pools, stage: int, mode: str, gas: int, seeds: range) -> set[int]:
    outcomes = pools(2).run(run_shuffled, stage, mode, gas, seeds)
    assert outcomes[0][1] == outcomes[1][1]
    for wrong, _, departures in outcomes:
        assert not wrong
        assert departures == 0
    return outcomes[0][1]


@pytest.mark.parametrize(("stage", "mode", "gas"), [(3, "aot_eager", 2), (2, "eager", 2)])
def test_random_schedules(pools: Pools, stage: int, mode: str, gas: int) -> None:
    assert len(check_shuffled(pools, stage, mode, gas, range(20))) >= 15


def test_many_random_schedules(pools: Pools) -> None:
    fingerprints: set[int] = set()
    for stage, mode, gas in itertools.product([2, 3], MODES, [1, 2]):
        fingerprints |= check_shuffled(pools, stage, mode, gas, range(1000, 1060))
    assert len(fingerprints) >= 150
