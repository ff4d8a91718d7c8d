"""What changing the schedule costs, and whether the simulator is right about what it brings.

    python -m benchmarks.schedule

On processes of the CPU. First a model of 32 small blocks is rescheduled between steps: the time of
`engine.reschedule` and what was compiled for it. Then blocks that sleep, with collectives that take a known time
each, one after another, are trained with prefetch 0, 1 and 2: the step's time as the simulator predicts it from one
record, beside the measured one. Exit code 1 unless a reschedule takes less than 50 ms (median of 9), nothing is
compiled, and each prediction is within 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from benchmarks import launch
from zeroweave.comm.clock import Clock
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.layout import BucketLayout
from zeroweave.schedule import simulate

LIMIT_MS = 50.0
TOLERANCE = 0.15
ROUNDS = 9
WIDTH = 16


class Block(nn.Module):
    """A linear layer; `seconds`: how long its forward sleeps, and its backward twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return x + (Sleep.apply(h, self.seconds) if self.seconds else torch.tanh(h))


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def stack(blocks: int, seconds: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(seconds) for _ in range(blocks)))


@dataclass
class DelayedPending:
    """A collective that is over no earlier than `end`, by `time.perf_counter`."""

    inner: Pending
    end: float

    def wait(self) -> None:
        self.inner.wait()
        time.sleep(max(0.0, self.end - time.perf_counter()))

    def over(self, clock: Clock) -> list[float]:
        return [self.end]


class Delayed(Around):
    """A transport whose gathers and reduce-scatters take `delay` seconds each, one after another."""

    def __init__(self, inner: Transport, delay: float) -> None:
        super().__init__(inner)
        self._delay, self._free = delay, 0.0

    def _delayed(self, pending: Pending) -> Pending:
        self._free = max(self._free, time.perf_counter()) + self._delay
        return DelayedPending(pending, self._free)

    def all_gather(self, flat: Tensor, shard: Tensor, layout: BucketLayout) -> Pending:
        return self._delayed(super().all_gather(flat, shard, layout))

    def reduce_scatter(self, out: Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._delayed(super().reduce_scatter(out, parts, layout, op))


@contextmanager
def training(module: nn.Module, **compile_: Any) -> Iterator[tuple[zw.Engine, Callable[[], None]]]:
    """An engine, and a function that trains one step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH)
    with zw.initialize(module, optimizer, {"stage": 3, "compile": compile_}) as engine:

        def step() -> None:
            engine.backward(engine(x).pow(2).mean())
            engine.step()

        yield engine, step


def reschedule(blocks: int) -> dict[str, Any]:
    """Milliseconds of each `engine.reschedule` by what was asked for, and what was compiled meanwhile."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("prefetch 2", {"prefetch": 2, "keep": "none"}),
        ("auto, within a memory budget", {"prefetch": "auto", "keep": "auto"}),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in asked}
    budget = blocks * 4 * WIDTH * (WIDTH + 1) // 4
    with training(stack(blocks), lower="aot_eager", memory_budget=budget, record_steps=1) as (engine, step):
        for _ in range(4):
            step()
        before = engine.stats
        for _ in range(ROUNDS):
            for name, changes in asked:
                dist.barrier()
                begin = time.perf_counter()
                engine.reschedule(**changes)
                times[name].append(1e3 * (time.perf_counter() - begin))
                step()
        after, schedule = engine.stats, engine.schedule
        assert schedule is not None and schedule.facts.costs is not None
        recompiles = after.graphs - before.graphs + after.templates - before.templates
        return {"times": times, "recompiles": recompiles, "instructions": len(schedule.instructions)}


def predict(blocks: int, delay: float, compute: float, steps: int) -> list[dict[str, float]]:
    """Predicted and measured seconds of a step, and of waiting in it, for each prefetch."""
    rows = []
    with training(stack(blocks, compute), enabled=False, prefetch=0, keep="none") as (engine, step):
        engine._context.transport.wrap(lambda inner: Delayed(inner, delay))
        for _ in range(2):
            step()
        with engine.record() as recorded:
            for _ in range(steps):
                step()
        costs = recorded.operations.costs
        for ahead in (0, 1, 2):
            plan = engine.compile_schedule(recorded.operations, prefetch_ahead=ahead)
            with plan.execute():
                step()
                with engine.record() as measured:
                    for _ in range(steps):
                        step()
            prediction, found = simulate(plan.schedule, costs), measured.operations.steps
            rows.append(
                {
                    "prefetch": ahead,
                    "predicted": prediction.seconds,
                    "measured": statistics.median(each.seconds for each in found),
                    "exposed_predicted": sum(prediction.waits.values()),
                    "exposed_measured": statistics.median(sum(each.waits.values()) for each in found),
                }
            )
    return rows


def work(rank: int, world: int, port: int, a: argparse.Namespace, out: str) -> None:
    """One rank, on the CPU."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), **launch.address(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = {"reschedule": reschedule(a.blocks), "predict": predict(8, a.delay, a.compute, a.steps)}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.schedule", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--blocks", type=int, default=32, help="of the model that is rescheduled")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--delay", type=float, default=5e-3, help="seconds of every collective in the prediction")
    p.add_argument("--compute", type=float, default=4e-3, help="seconds of a block's forward there")
    p.add_argument("--steps", type=int, default=5, help="measured for each prediction")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    found = launch.spawned(work, a.ranks, a)
    once = found["reschedule"]
    print(f"{a.blocks} blocks, {once['instructions']} instructions, {a.ranks} ranks: {once['recompiles']} recompiles\n")
    print("| engine.reschedule | ms, median of 9 (min–max) |\n|---|---|")
    good = once["recompiles"] == 0
    for name, times in once["times"].items():
        median = statistics.median(times)
        good = good and median < LIMIT_MS
        print(f"| {name} | {median:.1f} ({min(times):.1f}–{max(times):.1f}) |")
    forward, backward, delay = (1e3 * seconds for seconds in (a.compute, 2 * a.compute, a.delay))
    print(f"\n8 blocks, {forward:g} ms forward, {backward:g} ms backward, {delay:g} ms a collective\n")
    print("| prefetch | predicted ms | measured ms | difference | exposed, predicted ms | measured ms |")
    print("|---|---|---|---|---|---|")
    for row in found["predict"]:
        difference = row["predicted"] / row["measured"] - 1
        good = good and abs(difference) <= TOLERANCE
        seconds = [
            f"{1e3 * row[key]:.1f}" for key in ("predicted", "measured", "exposed_predicted", "exposed_measured")
        ]
        print(f"| {row['prefetch']} | {seconds[0]} | {seconds[1]} | {difference:+.1%} | {seconds[2]} | {seconds[3]} |")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
