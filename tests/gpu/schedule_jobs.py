"""What the ranks do in the GPU tests of schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.gpu.jobs import adamw, deterministic, join

WIDTH, BLOCKS, ROWS = 512, 6, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, and small modules behind each other at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.first, self.second, self.third = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.third(self.second(self.first(x)))


def rows(rank: int, index: int, device: torch.device) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank)).to(device)


def started(device: torch.device, gathers: str = "auto", **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(device)
    # as many buckets as modules, so that there are small ones
    config = {"stage": 3, "bucket": {"bytes": 4096}, "compile": {"lower": "aot_eager", **settings}}
    config |= {"transport": {"gathers": gathers}, "deadline_seconds": 60.0}
    return zw.initialize(model, adamw(model.parameters()), config)


def step(engine: Any, index: int) -> dict[str, Tensor]:
    engine.backward(engine(rows(engine.rank, index, engine.device)).pow(2).mean())
    gradients = engine.gradients()
    engine.step()
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def schedules(changes: list[dict[str, Any]]) -> list[tuple[bool, bool, int, int]]:
    """For each change: are gradients equal to the plain engine's, was the schedule followed, gathers, graphs."""
    device = join()
    found = []
    with deterministic(), started(device, prefetch=0, keep="none", record_steps=0) as plain:
        with started(device, prefetch=0, keep="none", record_steps=0) as engine:
            index = 0
            for _ in range(2):
                step(plain, index), step(engine, index)
                index += 1
            for change in changes:
                graphs = engine.stats.graphs
                engine.reschedule(**change)
                same = []
                for _ in range(2):
                    same.append(equal(step(plain, index), step(engine, index)))
                    index += 1
                gathers = sum(kind == "all_gather" for kind, _ in engine.schedule.collectives())
                followed = engine.executed == engine.schedule.instructions
                found.append((all(same), followed, gathers, engine.stats.graphs - graphs))
    return found


def recorded() -> tuple[list[tuple[str, float]], float, float, bool, int]:
    """Operations with their seconds, the step's seconds, those predicted, whether a plan runs, and bytes counted."""
    device = join()
    with started(device) as engine:
        for index in range(3):
            step(engine, index)
        with engine.record() as record:
            for index in range(3):
                step(engine, index)
        operations = record.operations
        plan = engine.compile_schedule(operations, prefetch_ahead="auto", keep="auto", memory_budget=1 << 34)
        with plan.execute():
            step(engine, 9)
            followed = engine.executed == plan.schedule.instructions
        predicted = zw.schedule.simulate(operations.schedule, operations.costs)
        return (
            [(o.kind, o.seconds) for o in operations],
            operations.steps[-1].seconds,
            predicted.seconds,
            followed,
            operations.costs.peak,
        )
