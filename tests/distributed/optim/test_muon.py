"""torch.optim.Muon, which computes with whole matrices, beside AdamW for the rest: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
BOUND = 1e-5
STEPS = 20


class Net(nn.Module):
    """Matrices of odd sizes, tall and wide, tied and frozen ones, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 24)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(24, 52), nn.Linear(52, 24)]) for _ in range(3))
        self.again = self.layers[0][0]
        self.seldom = nn.Linear(24, 24, bias=False)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 23)

    def forward(self, tokens: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.embed(tokens)
        for up, down in self.layers:
            x = x + down(up(x).tanh())
        x = x + self.frozen(x)
        if seldom:
            x = x + self.seldom(x)
        return nn.functional.cross_entropy(self.head(x)[:-1], tokens[1:])


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
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


def plain(world: int, gas: int, clipping: float | None = None, dtype: torch.dtype = torch.float64) -> Net:
    """One process that has the batches of all ranks."""
    model = build(dtype)
    both = optimizers(model)
    for step in range(STEPS):
        for micro in range(gas):
            for rank in range(world):
                (model(tokens(step, micro, rank), step > 1) / (world * gas)).backward()
        if clipping is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        for each in both:
            each.step()
            each.zero_grad()
    return model


def train(engine: Any, steps: range, gas: int) -> None:
    for step in steps:
        for micro in range(gas):
            engine.backward(engine(tokens(step, micro, engine.rank), step > 1))
            engine.step()


def far(stage: int, gas: int, more: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """The largest distance of a weight from one process, and from where it began."""
    model = build(dtype)
    with zw.initialize(model, optimizers(model), config(stage, gas, **more)) as engine:
        train(engine, range(STEPS), gas)
        world = engine.world
    reference, begin = plain(world, gas, more.get("gradient_clipping"), dtype), build(dtype)
    pairs = zip(model.parameters(), reference.parameters(), begin.parameters(), strict=True)
    distances = [(float((a - b).abs().max()), float((a - c).abs().max())) for a, b, c in pairs if a.requires_grad]
    return max(one for one, _ in distances), min(moved for _, moved in distances)


ROWS = [(world, gas, stage) for world in (1, 2, 3) for gas in (1, 4) for stage in (1, 2, 3)]
DAILY = {(2, 1, 3)}


@pytest.mark.parametrize(
    ("world", "gas", "stage"), [pytest.param(*r, marks=[] if r in DAILY else pytest.mark.matrix) for r in ROWS]
)
def test_weights_are_those_of_one_process(pools: Pools, world: int, gas: int, stage: int) -> None:
    for distance, moved in pools(world).run(far, stage, gas, {}):
        assert distance <= BOUND and moved > 0.01, (distance, moved)
