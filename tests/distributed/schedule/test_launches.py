"""Launches of equal small buckets and of reductions that are due together: the same numbers as one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.parity import digest
from tests.support.zoo import rows
from zeroweave.engine.scheduler import Plan
from zeroweave.schedule import Line, Reduce, Unshard


class Mixed(nn.Module):
    """A block of two dtypes, and so of two buckets whose gradients come together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixed() for _ in range(4)])
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return x


def engine_of(stage: int, mode: str, gas: int) -> Any:
    torch.manual_seed(5)
    module = Stack()
    config = {
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "deadline_seconds": 60.0,
        "reduce": {"depth": 4},
        "compile": {**MODES[mode], "prefetch": 1, "keep": "none", "fuse": False, "record_steps": 0},
    }
    return zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), config)


def step(engine: Any, gas: int) -> str:
    for micro in range(gas):
        x, y = rows(engine.rank, gas * engine.global_steps + micro)
        engine.backward(F.mse_loss(engine(x), y))
        if micro == gas - 1:
            found = digest([engine.gradients()])
        engine.step()
    return found


def launched(stage: int, mode: str, gas: int) -> tuple[int, int, int]:
    """The largest launches of gathers and of reductions, and departures; each step against one without launches."""
    with engine_of(stage, mode, gas) as plain, engine_of(stage, mode, gas) as engine:

        def both() -> None:
            assert step(engine, gas) == step(plain, gas)

        for _ in range(2):
            both()
        with engine.record() as recorded:
            both()
        operations = recorded.operations
        # What a start takes is not what decides here: gloo has no launch to save.
        costs = replace(operations.costs, gather=Line(1.0, 1e-6), reduce=Line(1.0, 1e-6), gathers={}, reductions={})
        costs = engine._scheduler._agreements.costs(operations.schedule, costs)
        priced = replace(operations, costs=costs)
        plan = engine.compile_schedule(priced, fuse=True)
        assert isinstance(plan, Plan)
        sizes = [max(len(x) for x in plan.schedule.launches if isinstance(x[0], kind)) for kind in (Unshard, Reduce)]
        engine.use(plan)
        for _ in range(2):
            both()
            assert engine.executed == plan.schedule.instructions
        plain.module.backwards = engine.module.backwards = True
        both()
        departures = engine.stats.departures
        both()
        return *sizes, departures


def check(pools: Pools, stage: int, mode: str, gas: int) -> None:
    one, other = pools(2).run(launched, stage, mode, gas)
    assert one == other
    gathers, reductions, departures = one
    # eager modules of a block are calls of their own, which lie between
    assert gathers >= 4 and reductions >= (1 if mode == "eager" else 2) and departures == 1


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "mode", "gas"), [(1, "aot_eager", 2), (2, "eager", 1), (3, "aot_eager", 1)])
def test_launches_change_no_number(pools: Pools, stage: int, mode: str, gas: int) -> None:
    check(pools, stage, mode, gas)


@pytest.mark.matrix
@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_launches_change_no_number_anywhere(pools: Pools, stage: int, mode: str, gas: int) -> None:
    check(pools, stage, mode, gas)
