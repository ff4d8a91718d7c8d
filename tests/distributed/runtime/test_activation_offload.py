"""Activations that wait in host memory: every bit is the same, with whatever else happens in a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import WITH_INDUCTOR as MODES
from zeroweave.schedule import Needed, Offload

pytestmark = pytest.mark.matrix

WIDTH, ROWS, BLOCKS = 8, 96, 6
BYTES = ROWS * WIDTH * 4
"""Of a block's output; parameters are smaller."""
WAYS = ("plain", "accumulated", "twice", "checkpoint", "reentrant", "retained", "two forwards")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(hidden.transpose(0, 1), 0.1, self.training).transpose(0, 1))


class Net(nn.Module):
    """`way`: "twice" runs each block two times in a row, the checkpoints are around the blocks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "reentrant":
            x = x.requires_grad_()
        for block in self.blocks:
            if self.way in ("checkpoint", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
            else:
                x = block(block(x)) if self.way == "twice" else block(x)
        return self.head(x)


def batch(rank: int, index: int) -> Tensor:
    torch.manual_seed(100 * index + rank)  # of the dropout as well
    return torch.randn(ROWS, WIDTH)


def backward(engine: Any, way: str, rank: int, index: int) -> Tensor:
    """One micro-step up to its step; the loss."""
    x, other = batch(rank, index + 50), None
    if way == "two forwards":
        other = engine(x).pow(2).mean()
    y = batch(rank, index)  # held by the program, so that it stays
    loss = engine(y).pow(2).mean()
    if other is not None:
        engine.backward(other)
    if way == "retained":
        engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    return loss.detach()


@dataclass(frozen=True)
class Course:
    """What one rank's steps gave. `moved`: bytes of each step; `expected`: of all that its schedule moves."""

    values: list[Tensor]
    moved: list[int]
    expected: int
    on_demand: int
    departures: int
    followed: bool
    compiled: int
    left: int
    """bytes in host memory at the end"""


def train(stage: int, mode: str, way: str, wanted: bool, steps: int = 4) -> Course:
    torch.manual_seed(0)
    model = Net(way)
    config = {
        "stage": stage,
        "compile": MODES[mode],
        "gradient_accumulation_steps": 2 if way == "accumulated" else 1,
        "offload": {"activations": wanted, "activations_threshold_bytes": BYTES},
    }
    values, moved, followed = [], [], True
    engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    for step in range(steps):
        for micro in range(config["gradient_accumulation_steps"]):
            values.append(backward(engine, way, engine.rank, 2 * step + micro))
            if engine.is_gradient_accumulation_boundary():
                values += engine.gradients().values()
            engine.step()
        moved.append(engine.stats.offloaded_activations)
        followed &= step == 0 or engine.executed == engine.schedule.instructions
    with engine.full_parameters() as full:
        values += [p.detach().clone() for p in full.values()]
    schedule, stats = engine.schedule, engine.stats
    left = 0 if not wanted else engine._runtime.activations.offloading.host.now
    engine.destroy()
    out = {(i.call, i.number) for i in schedule.instructions if isinstance(i, Offload)}
    expected = sum(e.nbytes for e in schedule.record if isinstance(e, Needed) and (e.call, e.number) in out)
    return Course(
        values, moved, expected, stats.on_demand_reloads, stats.departures, followed, stats.compiled_calls, left
    )


def both(stage: int, mode: str, way: str) -> tuple[bool, Course]:
    """Is every value equal, bit for bit, to that of an engine whose activations stay? And the course of the others."""
    stay, move = (train(stage, mode, way, wanted) for wanted in (False, True))
    assert not any(stay.moved) and not stay.expected
    return all(map(torch.equal, stay.values, move.values)) and len(stay.values) == len(move.values), move


EVERY_WAY = [(stage, mode, way) for stage in (1, 2, 3) for mode in ("eager", "aot_eager") for way in WAYS]


@pytest.mark.parametrize(("stage", "mode", "way"), [*EVERY_WAY, (3, "inductor", "plain")])
def test_every_bit_is_the_same(pools: Pools, stage: int, mode: str, way: str) -> None:
    for equal, course in pools(2).run(both, stage, mode, way):
        assert equal
        assert course.followed and not course.departures and (course.compiled > 0) == (mode != "eager")
        # the model's forward holds the input of the last block's first call until the second one is over
        held = BYTES if way == "twice" else 0
        assert course.moved == [0, *[course.expected - held] * 3] and course.expected >= BYTES * (BLOCKS - 3)
        assert not course.on_demand and not course.left
