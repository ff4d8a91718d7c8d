"""What a process keeps of steps that are over: resident memory, over many steps of all kinds, must not grow.

    python -m benchmarks.endurance.resident --steps 10000

One process trains a tiny model: batches of several lengths, now and then a forward that raises, an evaluation, a step
that leaves a block out or takes the blocks in another order, another schedule, a checkpoint. Exit code 1 where resident
memory grows by more than `LIMIT` for 1,000 steps after the first ones. `--trace` prints what has grown: the lines of
Python that allocate it, and of which types there are more objects.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.engine.stats import Stats

LIMIT = 1.0
"""MiB for 1,000 steps."""
LENGTHS = (3, 5, 8, 6, 16, 4, 7)
RAISES, EVALUATES, LEAVES_OUT, DEPARTS, RESCHEDULES, SAVES = 37, 50, 31, 41, 97, 201
"""Each so many steps one of these."""
MODES = {"eager": {"enabled": False}, "aot_eager": {"lower": "aot_eager"}}
WIDTH, BLOCKS = 16, 3


class Broken(Exception):
    """What the program's own forward raises."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, which a forward takes in any order, or raises in their midst."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: Sequence[int] = range(BLOCKS), broken: bool = False) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
            if broken and number == 1:
                raise Broken
        out: Tensor = self.head(x)
        return out.square().mean()


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident MiB and how many blocks of memory Python has given to objects, after so many steps."""

    step: int
    mib: float
    blocks: int


def resident() -> float:
    """MiB of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def step(engine: zw.Engine, number: int, generator: torch.Generator, folder: Path) -> None:
    """One optimizer step, and what else is due."""
    x = torch.randn(2, LENGTHS[number % len(LENGTHS)], WIDTH, generator=generator)
    if number % RAISES == RAISES - 1:
        try:
            engine(x, broken=True)
        except Broken:
            engine.zero_grad()
    order = list(range(BLOCKS))
    if number % LEAVES_OUT == LEAVES_OUT - 1:
        del order[number // LEAVES_OUT % BLOCKS]
    if number % DEPARTS == DEPARTS - 1:
        order.reverse()
    engine.backward(engine(x, order=order))
    engine.step()
    if number % EVALUATES == EVALUATES - 1:
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
    if number % RESCHEDULES == RESCHEDULES - 1:
        engine.reschedule(prefetch=number // RESCHEDULES % 3)
    if number % SAVES == SAVES - 1:
        engine.save(folder, asynchronous=number % 2 == 0)


def train(
    stage: int, mode: str, steps: int, every: int, first: int, traced: bool = False
) -> tuple[list[Sample], Stats]:
    """Trains, and looks each `every` steps from step `first` on."""
    torch.manual_seed(0)
    model = Model()
    config = {"stage": stage, "compile": MODES[mode], "checkpoint": {"keep_last": 1}}
    generator = torch.Generator().manual_seed(1)
    found, before = list[Sample](), Counter[str]()
    tracer = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder, zw.initialize(model, optimizer, config) as engine:
        for number in range(steps):
            step(engine, number, generator, Path(folder))
            if number + 1 >= first and (number + 1) % every == 0:
                gc.collect()
                found.append(Sample(number + 1, resident(), sys.getallocatedblocks()))
                if traced and len(found) == 1:
                    before.update(type(each).__qualname__ for each in gc.get_objects())
                    tracemalloc.start(12)
                    tracer = tracemalloc.take_snapshot()
        if tracer is not None:
            grown(tracer, before)
        return found, engine.stats


def grown(tracer: tracemalloc.Snapshot, before: Counter[str]) -> None:
    """Prints where memory has been taken since, and of which types there are more objects."""
    for line in tracemalloc.take_snapshot().compare_to(tracer, "traceback")[:12]:
        print(f"{line.size_diff / 1024:+.1f} KiB in {line.count_diff:+d} blocks")
        print("\n".join(line.traceback.format()[-6:]))
    more = Counter(type(each).__qualname__ for each in gc.get_objects())
    more.subtract(before)
    print("more objects:", [(name, count) for name, count in more.most_common(12) if count > 0])


def growth(found: Sequence[Sample]) -> tuple[float, float]:
    """MiB and blocks for 1,000 steps: the slope of a straight line through all samples."""
    xs = torch.tensor([each.step / 1000 for each in found], dtype=torch.float64)
    ys = torch.tensor([(each.mib, each.blocks) for each in found], dtype=torch.float64)
    xs = xs - xs.mean()
    slope = (xs[:, None] * (ys - ys.mean(0))).sum(0) / xs.square().sum()
    return float(slope[0]), float(slope[1])


def parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").split("\n", 1)[0]
    p = argparse.ArgumentParser(prog="python -m benchmarks.endurance.resident", description=description)
    p.add_argument("--steps", type=int, default=10_000)
    p.add_argument("--first", type=int, default=2_000, help="steps before the first look")
    p.add_argument("--every", type=int, default=500, help="steps between two looks")
    p.add_argument("--stage", type=int, default=3)
    p.add_argument("--mode", choices=sorted(MODES), default="eager")
    p.add_argument("--trace", action="store_true", help="print what has grown; steps take longer")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    found, stats = train(a.stage, a.mode, a.steps, a.every, a.first, a.trace)
    for each in found:
        print(f"step {each.step}: {each.mib:.2f} MiB resident, {each.blocks} blocks")
    mib, blocks = growth(found)
    print(
        f"stage {a.stage}, {a.mode}, {a.steps} steps, {stats.departures} departures: "
        f"{mib:+.3f} MiB and {blocks:+.0f} blocks for 1,000 steps"
    )
    return int(mib > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
