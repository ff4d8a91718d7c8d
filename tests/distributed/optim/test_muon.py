"""torch.optim.Muon, which computes with whole matrices, beside AdamW for the rest: as in one process.

Newton-Schulz turns the last bit of a gradient into 1e-3 of an update: it normalises, and computes in bfloat16. Where
ranks and micro-batches are summed in another order than in one process, weights are therefore equal to within rounding
in float64 only. In float32 the rows have gradients that are exact in every order of summation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools

BOUND = 1e-5
STEPS = 20
GRID = 3 * 2.0**-20
"""What gradients are multiples of: their sums are exact in float32, and so is a third of them, which 3 ranks have."""
Row = tuple[int, int, int, torch.dtype]


class OnGrid(torch.autograd.Function):
    """A weight, whose gradient is rounded to the grid."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (gradient / GRID).round() * GRID


class Linear(nn.Linear):
    """In float32 its gradients are exact sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype != torch.float32:
            return super().forward(x)
        bias = None if self.bias is None else OnGrid.apply(self.bias)
        return nn.functional.linear(x, OnGrid.apply(self.weight), bias)


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.dtype != torch.float32 else OnGrid.apply(self.weight)
        return nn.functional.embedding(tokens, weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(24, 52), Linear(52, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Matrices of odd sizes, tall and wide, tied and frozen ones, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(23, 24)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.again = self.layers[0].up
        self.seldom = Linear(24, 24, bias=False)
        self.frozen = Linear(24, 24).requires_grad_(False)
        self.head = Linear(24, 23)

    def forward(self, tokens: torch.Tensor, seldom: bool = True) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        x = x + self.frozen(x) + self.layers[0].down(self.again(x).sin())
        if seldom:
            x = x + self.seldom(x)
        return nn.functional.cross_entropy(self.head(x)[:-1], tokens[1:])


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def optimizers(model: Net) -> list[torch.optim.Optimizer]:
    """As people train with it: hidden matrices by Muon, the rest by AdamW."""
    matrices = [p for part in (model.layers, model.seldom) for p in part.parameters() if p.ndim == 2]
    names = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in names]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(rest, lr=3e-3)]


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 23, (17,), generator=generator)


def config(stage: int, gas: int = 1, **more: Any) -> dict[str, Any]:
    common = {"compile": {"enabled": False}, "deadline_seconds": 200.0, "gradient_accumulation_steps": gas}
    return {"stage": stage, **common, **more}


def plain(world: int, gas: int, dtype: torch.dtype) -> Net:
    """One process that has the batches of all ranks."""
    model = build(dtype)
    both = optimizers(model)
    for step in range(STEPS):
        for micro in range(gas):
            for rank in range(world):
                (model(tokens(step, micro, rank), step > 1) / gas).backward()
        for parameter in (p for p in model.parameters() if p.grad is not None):
            parameter.grad /= world
            assert dtype == torch.float64 or parameter.grad.abs().max() < GRID * 2**22, "sums would not be exact"
        for each in both:
            each.step()
            each.zero_grad()
    return model


def train(engine: Any, steps: range, gas: int = 1) -> None:
    for step in steps:
        for micro in range(gas):
            engine.backward(engine(tokens(step, micro, engine.rank), step > 1))
            engine.step()


def far(stage: int, gas: int, dtype: torch.dtype) -> tuple[float, float]:
    """The largest distance of a weight from one process, and from where it began."""
    model = build(dtype)
    with zw.initialize(model, optimizers(model), config(stage, gas)) as engine:
        train(engine, range(STEPS), gas)
        world = engine.world
    reference, begin = plain(world, gas, dtype), build(dtype)
    pairs = zip(model.parameters(), reference.parameters(), begin.parameters(), strict=True)
    distances = [(float((a - b).abs().max()), float((a - c).abs().max())) for a, b, c in pairs if a.requires_grad]
    return max(one for one, _ in distances), min(moved for _, moved in distances)


DTYPES = (torch.float32, torch.float64)
ROWS = [(world, gas, stage, d) for world in (1, 2, 3) for gas in (1, 4) for stage in (1, 2, 3) for d in DTYPES]
DAILY: set[Row] = {(2, 1, 3, torch.float32)}


@pytest.mark.parametrize(
    ("world", "gas", "stage", "dtype"),
    [pytest.param(*r, marks=[] if r in DAILY else pytest.mark.matrix) for r in ROWS],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_weights_are_those_of_one_process(pools: Pools, world: int, gas: int, stage: int, dtype: torch.dtype) -> None:
    for distance, moved in pools(world).run(far, stage, gas, dtype):
        assert distance <= BOUND and moved > 0.01, (distance, moved)
