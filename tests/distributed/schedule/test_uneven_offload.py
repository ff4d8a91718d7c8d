"""Activations in host memory, and batches of another length on each rank: all fill the same memory all the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

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
    module = torch.nn.Sequential(*(Block() for _ in range(6)))
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
