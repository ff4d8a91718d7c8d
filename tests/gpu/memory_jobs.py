"""What the ranks do in the GPU tests of memory budgets."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.gpu.jobs import adamw, deterministic, join
from tests.support.parity import digest
from zeroweave.schedule import foreseen

WIDTH, BLOCKS, ROWS = 1024, 8, 1024
USUAL = 7
"""Steps until the schedule has settled, and two more."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Filled(NamedTuple):
    """Of each step: rows of its batch, buckets that the next one keeps, its fingerprint, a hash of its gradients.

    `expected`, `peak`: bytes at most in a step that has settled, as foreseen and as they were. `room`, `total`:
    as agreed, and of the device. `told`: by the log.
    """

    rows: list[int]
    kept: list[int]
    fingerprints: list[int]
    gradients: list[str]
    expected: int
    peak: int
    room: int
    total: int
    told: list[str]


def started(device: torch.device, compile_: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Net().to(device)
    compile_ = {"lower": "aot_eager", "dynamic": True, "cuda_graphs": False, **compile_}
    config = {"stage": 3, "compile": compile_, "deadline_seconds": 100.0}
    return zw.initialize(model, adamw(model.parameters()), config)


def step(engine: Any, index: int, rows: int) -> str:
    random = torch.Generator().manual_seed(100 * index + engine.rank)
    batch = torch.randn(rows, WIDTH, generator=random).to(engine.device)
    engine.backward(engine(batch).pow(2).mean())
    found = digest([{"first": engine.full("blocks.0.up.weight", "grad").cpu()}])
    engine.step()
    return found


def kept(engine: Any) -> int:
    gathers = [bucket for kind, bucket in engine.schedule.collectives() if kind == "all_gather"]
    return sum(gathers.count(bucket) == 1 for bucket in set(gathers))


def filled(compile_: dict[str, Any], cap: int | None = None, rows: list[int] | None = None) -> Filled:
    """Trains on batches of so many rows; None: `USUAL` steps, and with a cap more that grow until fewer are kept.

    `cap`: bytes that this process may reserve.
    """
    device = join()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    given: list[int] = []
    kept_: list[int] = []
    prints: list[int] = []
    gradients: list[str] = []
    told: list[str] = []
    steps = USUAL if cap is None else USUAL + 60
    size = float(ROWS)
    with deterministic(), started(device, compile_) as engine:
        if cap is not None:
            torch.cuda.set_per_process_memory_fraction(cap / total)
        try:
            for index in range(steps if rows is None else len(rows)):
                if index >= USUAL and kept_[-1] == BLOCKS:
                    size *= 1.06
                given.append(int(size) // 8 * 8 if rows is None else rows[index])
                if index == USUAL - 1:
                    torch.cuda.reset_peak_memory_stats()
                gradients.append(step(engine, index, given[-1]))
                kept_.append(kept(engine))
                prints.append(engine.schedule.fingerprint)
                told += [each.reason for each in engine._context.journal.take() if "memory is short" in each.reason]
                if index == USUAL - 1:
                    peak = torch.cuda.max_memory_allocated()
                    costs = engine.schedule.costs
                    expected = foreseen(costs, engine.schedule)
                if rows is None and index > USUAL + 2 and kept_[-3] < BLOCKS:
                    break
            return Filled(given, kept_, prints, gradients, expected, peak, costs.room, total, told)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
