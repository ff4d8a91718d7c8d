"""Ranks that measure other things, by batches of another length or other work: all follow the same schedules."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.memory import counted
from tests.support.parity import digest
from tests.support.twins import WIDTH, Block

SHORT = 64
"""Rows of a batch on rank 0; on rank 1 it is twice as long."""
ALL, LONG = 0, 2 * SHORT * WIDTH * 4
"""Bytes from which on storages move: on both ranks, and on rank 1 only."""
SIZE = 600_000


class Course(NamedTuple):
    """The schedule's fingerprint and budget behind each step, bytes that were moved, departures, and the values."""

    fingerprints: list[int]
    memory: list[int | None]
    moved: int
    departures: int
    values: str


def course(budget: Any, threshold: int | None) -> Course:
    """`threshold`: None: nothing is moved."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Block() for _ in range(6)))
    config = {
        "stage": 3,
        "deadline_seconds": 60.0,
        "offload": {"activations": threshold is not None, "activations_threshold_bytes": threshold or 0},
        "compile": {"enabled": False, "record_steps": 1, "memory_budget": budget},
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with counted(SIZE) as clock, zw.initialize(module, optimizer, config) as engine:
        clock.attach(engine)
        prints, memory = [], []
        for index in range(6):
            rows = torch.randn(SHORT * (1 + engine.rank), WIDTH, generator=torch.Generator().manual_seed(index))
            loss = engine(rows).square().mean()
            clock.add(1000 * len(rows))
            engine.backward(loss)
            clock.add(-clock.added)
            engine.step()
            prints.append(engine.schedule.fingerprint)
            memory.append(engine.schedule.facts.memory)
        with engine.full_parameters() as full:
            values = digest([{name: each.detach().clone() for name, each in full.items()}])
        stats = engine.stats
        return Course(prints, memory, stats.offloaded_activations, stats.departures, values)


def courses() -> dict[tuple[Any, int | None], Course]:
    cases = [("none", None), ("auto", ALL), ("auto", LONG), (SIZE // 2, ALL), (SIZE // 2, LONG)]
    return {case: course(*case) for case in cases}


def test_ranks_that_move_unequal_activations_fill_the_same_memory(pools: Pools) -> None:
    short, long = pools(2).run(courses)
    plain = short["none", None]
    for (budget, threshold), one in short.items():
        other = long[budget, threshold]
        assert (one.fingerprints, one.memory) == (other.fingerprints, other.memory)
        assert one.departures == other.departures == 0
        assert one.values == other.values == plain.values
        if threshold is not None:
            assert one.memory[-1] is not None and other.moved > one.moved
            assert (one.moved == 0) == (threshold == LONG)


class Repeated(nn.Module):
    """Runs its blocks so many `times`: with all of it kept, the same is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return x


def planned(alike: bool, budget: Any) -> tuple[Any, ...]:
    """A plan is made and used where the ranks compute the same, or one more than the other: is it by common costs?"""
    torch.manual_seed(0)
    module = Repeated()
    compile_ = {"enabled": False, "record_steps": 1, "memory_budget": budget}
    config = {"stage": 2, "deadline_seconds": 60.0, "compile": compile_}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    rank = torch.distributed.get_rank()
    with counted(SIZE + 4096 * rank) as clock, zw.initialize(module, optimizer, config) as engine:
        clock.attach(engine)
        module.times = 1 if alike else 1 + rank

        def step() -> None:
            engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
            clock.add(1000 * (1 + rank))
            engine.step()
            clock.add(-clock.added)

        for _ in range(5):
            step()
        with engine.record() as recorded:
            step()
            step()
        found = []
        for prefetch in (2, "auto"):
            plan = engine.compile_schedule(recorded.operations, prefetch_ahead=prefetch)
            plan.use()
            step()
            found.append((plan.schedule.fingerprint, plan.schedule.facts.memory))
        return recorded.operations.agreed, found


@pytest.mark.parametrize("budget", ["auto", SIZE // 2])
def test_plans_have_the_same_budget_where_ranks_compute_different_things(pools: Pools, budget: Any) -> None:
    for alike in (True, False):
        one, other = pools(2).run(planned, alike, budget)
        assert one == other and one[0] == alike
        for _, memory in one[1]:
            assert (memory is None) == (not alike and budget == "auto")
