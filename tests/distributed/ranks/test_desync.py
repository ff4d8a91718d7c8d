"""Ranks that come to differ: an error that says where on every rank, in time, or a correct run; never a wrong number.

What must be an error: another model, config, bucket order, version of PyTorch or schedule, and other collectives.
What is a correct run: whatever one rank computes otherwise, as long as it sends what the others send.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Outcome, Pools
from tests.support.marks import daily, slow
from tests.support.patience import patient
from tests.support.reference import Plain, judge
from tests.support.zoo import Block, rows
from zeroweave.errors import AgreementError, EngineError
from zeroweave.schedule import Schedule, Unshard
from zeroweave.schedule.passes import prefetch

DEADLINE = 8.0
SLACK = 2.0
"""Seconds beyond the deadline that an error may take on an idle machine."""


class Odd(nn.Module):
    """Blocks of equal size. Rank 1 can be told to go through them otherwise, or to break its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock() for _ in range(4)])
        self.what = ""

    def forward(self, x: Tensor) -> Tensor:
        order = {"swap": (0, 2, 1, 3), "skip": (0, 1, 3)}.get(self.what, (0, 1, 2, 3))
        for index in order:
            self.blocks[index].breaks = self.what == "break"
            x = self.blocks[index](x)
        return x


class OddBlock(Block):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.mlp(h)


@contextmanager
def training(module: nn.Module, stage: int = 3, **settings: Any) -> Iterator[Any]:
    config = {"stage": stage, "deadline_seconds": DEADLINE, "compile": {"lower": "aot_eager"}, **settings}
    with zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05), config) as engine:
        yield engine


def step(engine: Any, index: int) -> None:
    x, y = rows(engine.rank, index)
    engine.backward(F.mse_loss(engine(x), y))
    engine.step()


@contextmanager
def refused(error: type[Exception], *texts: str) -> Iterator[None]:
    """Raises on this rank, in time, with all of these texts."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    assert time.monotonic() - began < DEADLINE + patient(SLACK)
    for text in texts:
        assert re.search(text, str(caught.value)), caught.value


def other_config() -> None:
    """A key of the config."""
    names = r"the config differs between ranks \d and \d: reduce"
    with refused(EngineError, names), training(Odd(), reduce={"depth": 1 + dist.get_rank()}):
        pass


def other_bucket_order() -> None:
    """Modules registered in another order, which is the order of the buckets."""
    names = ["first", "second"][:: 1 - 2 * dist.get_rank()]
    module = nn.ModuleDict({name: nn.Sequential(Block(), Block()) for name in names})
    two = (
        rf"parameter '{name}.0.norm.weight' \[16\] of float32, trained, in block '{name}.0'"
        for name in ("first", "second")
    )
    told = ("ranks built different models", *two, "on rank 0", "on rank 1")
    with refused(EngineError, *told), training(module):
        pass


def other_version() -> None:
    version = torch.__version__
    try:
        torch.__version__ = "2.99.0" if dist.get_rank() else "2.98.0"
        names = "different versions of PyTorch: 2.9[89].0 on rank [01], 2.9[89].0 on rank [01]"
        with refused(EngineError, names), training(Odd()):
            pass
    finally:
        torch.__version__ = version


def swap_two(schedule: Schedule) -> Schedule:
    """The first two gathers, of equal size, in another order."""
    out = list(schedule.instructions)
    a, b = [n for n, i in enumerate(out) if isinstance(i, Unshard)][:2]
    out.insert(a, out.pop(b))
    return replace(schedule, instructions=tuple(out))


def other_pass() -> None:
    """A pass that one rank only has, registered before the first step, or later."""
    differs = (
        r"rank 0 has 'all_gather blocks\.\d",
        r"rank 1 has 'all_gather blocks\.\d",
        "different schedules: at [0-9]+",
    )
    for late in (False, True):
        with training(Odd()) as engine:
            if late:
                step(engine, 0)
            if engine.rank == 1:
                engine.register_pass(swap_two, after="prefetch")
            with refused(AgreementError, *differs):
                if late:
                    engine.reschedule(prefetch=2)
                else:
                    step(engine, 0)
            engine.zero_grad()


def equal_pass() -> int:
    """A pass of one rank that changes nothing of what is sent is its own affair."""
    with training(Odd(), stage=2) as engine:
        if engine.rank == 1:
            engine.register_pass(prefetch)
        for index in range(3):
            step(engine, index)
        return engine.stats.departures


@slow("other_pass")
@pytest.mark.parametrize("job", [other_config, other_bucket_order, other_version, other_pass])
def test_refused_before_anything_is_sent(pools: Pools, job: Callable[[], None]) -> None:
    pools(2).run(job)


def test_a_pass_that_sends_the_same(pools: Pools) -> None:
    assert pools(2).run(equal_pass) == [0, 0]


def odd_step(what: str, stage: int, at: int) -> int:
    """Rank 1 does something else from the step `at` on; prints when it begins, returns the optimizer steps."""
    torch.manual_seed(0)
    module = Odd()
    with training(module, stage) as engine:
        for index in range(at + 3):
            if index == at:
                print(f"odd at {time.time():.3f}", file=sys.stderr, flush=True)
                module.what = what if engine.rank == 1 else ""
            step(engine, index)
        return int(engine.global_steps)


def check_ended(outcomes: list[Outcome], *names: str) -> None:
    """Every rank failed, in time; the errors together say which ranks and which collective."""
    told = "\n".join(f"{o.kind} {o.message} {o.stderr}" for o in outcomes)
    began = max(float(found) for found in re.findall(r"odd at ([\d.]+)", told))
    for outcome in outcomes:
        assert outcome.failed, f"rank {outcome.rank} trained on: {outcome.value}"
        assert outcome.ended - began < DEADLINE + patient(SLACK), (
            f"rank {outcome.rank} ended after {outcome.ended - began:.1f} s"
        )
    for name in names:
        assert re.search(name, told), told


@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.matrix)])
def test_other_collectives_at_stage_3(disposable: Pools, at: int) -> None:
    """Blocks of equal size that one rank takes in another order."""
    outcomes = disposable(2).outcomes(odd_step, "swap", 3, at, deadline=120.0)
    check_ended(outcomes, "rank 0", "rank 1", r"(all_gather|reduce_scatter) blocks\.\d")


def parity(what: str, stage: int) -> tuple[tuple[float, str], int]:
    """Rank 1 does something else in some steps; the worst difference to plain training, and departures."""
    torch.manual_seed(0)
    plain = Plain(Odd(), lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    torch.manual_seed(0)
    module = Odd()
    # Before there is a schedule, nobody knows at stage 3 which gather belongs to the block that is left out.
    odd = (3, 4, 8) if (what, stage) == ("skip", 3) else (0, 3, 4, 8)
    with training(module, stage, deadline_seconds=200.0) as engine:
        for index in range(10):
            for net in (*plain.nets, module):
                net.what = what if engine.rank == 1 and index in odd else ""
            step(engine, index)
            x, y = rows(engine.rank, index)
            plain.each(lambda net, x, y: F.mse_loss(net(x), y).backward(), x, y)
            plain.average()
            plain.step()
        with engine.full_parameters() as full:
            return judge(full, plain.values()), engine.stats.departures


@pytest.mark.matrix
@daily(("what", "stage"), [("swap", 2), ("break", 1)], [("skip", 1), ("skip", 3), ("break", 2), ("break", 3)])
def test_what_one_rank_may_do_otherwise(pools: Pools, what: str, stage: int) -> None:
    """A branch, a block that is left out, and a graph that breaks, on one rank: it sends what the others send."""
    for difference, _ in pools(2).run(parity, what, stage):
        assert difference[0] <= 1, difference
