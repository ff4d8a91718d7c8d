"""Failures on some ranks end the others quickly, with the reason; nobody waits, nobody gets a number."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Outcome, Pool
from tests.support.marks import daily, slow
from tests.support.models import entry
from tests.support.patience import patient
from tests.support.reference import build, draw, sgd
from tests.support.zoo import Block, Stack, rows

Disposable = Callable[[int], Pool]
LIMIT = 2.0
"""Seconds from an exception on one rank to the end of the others."""


def config(stage: int, mode: str, deadline: float = 200.0) -> dict[str, Any]:
    compile_ = {"enabled": False} if mode == "eager" else {"lower": mode}
    return {"stage": stage, "compile": compile_, "deadline_seconds": deadline}


def trip() -> None:
    raise ValueError(f"no more batteries at {time.time():.3f}")


class Tripping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tripped: bool) -> Tensor:
        ctx.tripped = tripped
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.tripped:
            trip()
        return gradients[0], None


class TrippingStack(Stack):
    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, module in enumerate((self.enter, *self.blocks, self.leave)):
            x = module(x)
            if index == 2:
                if self.place == "forward":
                    trip()
                x = Tripping.apply(x, self.place == "backward")
        return x


class TrippingSchedule(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that raises when told to: an exception inside `engine.step()`."""

    tripped = False

    def step(self, epoch: int | None = None) -> None:
        if self.tripped:
            trip()
        super().step(epoch)


def fail_on_one_rank(place: str, stage: int, mode: str, failing: int, at: int) -> int:
    """Train; at step `at` one rank raises in `place`. Returns the steps done."""
    torch.manual_seed(0)
    module = TrippingStack()
    optimizer = sgd(list(module.parameters()))
    scheduler = TrippingSchedule(optimizer, lambda step: 1.0)
    with zw.initialize(module, optimizer, config(stage, mode), lr_scheduler=scheduler) as engine:
        for step in range(at + 20):
            if step == at and dist.get_rank() == failing:
                module.place, scheduler.tripped = place, place == "step"
            x, y = rows(dist.get_rank(), step)
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
    return int(engine.global_steps)


def assert_ended_by(outcomes: list[Outcome], failing: int) -> None:
    """The failing rank has its own exception; every other process ended in time and says who failed and why.

    Its alarm ends it, or, where another rank's process ended a moment earlier, the broken connection does.
    """
    own = outcomes[failing]
    assert own.kind == "ValueError" and "no more batteries" in own.message, own.describe()
    raised = float(re.findall(r"batteries at ([\d.]+)", own.message)[0])
    for outcome in outcomes:
        if outcome.rank != failing:
            assert outcome.failed, outcome.describe()
            said = outcome.stderr + outcome.message
            assert f"rank {failing} failed" in said and "no more batteries" in said, outcome.describe()
            assert outcome.ended - raised < patient(LIMIT), (outcome.rank, outcome.ended - raised)


FAILURES = [
    ("forward", 3, "aot_eager", 2, 1, 3),
    ("backward", 2, "eager", 2, 0, 0),
    ("backward", 3, "aot_eager", 3, 1, 2),
]
MORE_FAILURES = [
    ("step", 3, "eager", 2, 1, 1),
    ("forward", 1, "eager", 2, 0, 0),
    ("backward", 1, "aot_eager", 3, 2, 2),
    ("step", 2, "aot_eager", 4, 3, 2),
]


def one_rank_fails(
    disposable: Disposable, place: str, stage: int, mode: str, world: int, failing: int, at: int
) -> None:
    outcomes = disposable(world).outcomes(fail_on_one_rank, place, stage, mode, failing, at)
    assert_ended_by(outcomes, failing)


@slow("backward-3-aot_eager-3-1-2", "forward-3-aot_eager-2-1-3")
@pytest.mark.parametrize(("place", "stage", "mode", "world", "failing", "at"), FAILURES)
def test_an_exception_on_one_rank(
    disposable: Disposable, place: str, stage: int, mode: str, world: int, failing: int, at: int
) -> None:
    one_rank_fails(disposable, place, stage, mode, world, failing, at)


@pytest.mark.matrix
@pytest.mark.parametrize(("place", "stage", "mode", "world", "failing", "at"), MORE_FAILURES)
def test_an_exception_on_one_rank_in_the_matrix(
    disposable: Disposable, place: str, stage: int, mode: str, world: int, failing: int, at: int
) -> None:
    one_rank_fails(disposable, place, stage, mode, world, failing, at)


def leave_without_destroying(stage: int) -> None:
    """Rank 1 exits in the middle of training."""
    model = entry("mlp")
    module = build(model)
    engine = zw.initialize(module, sgd(list(module.parameters())), config(stage, "eager"))
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            sys.exit(0)
        draw(dist.get_rank(), step)
        model.micro(engine, engine.module, model.batch(dist.get_rank(), step), engine.backward)
        engine.step()
    engine.destroy()


@pytest.mark.matrix
def test_a_rank_that_leaves(tmp_path: Path) -> None:
    with Pool(2, tmp_path) as pool:  # not forked: what is registered with atexit must run
        outcomes = pool.outcomes(leave_without_destroying, 3)
    assert outcomes[1].exit_code is not None
    assert outcomes[0].failed and "rank 1" in outcomes[0].stderr + outcomes[0].message, outcomes[0].describe()


def skip_the_step(stage: int) -> int:
    """Rank 1 runs the backward and does not come to `step()`."""
    model = entry("mlp")
    module = build(model)
    engine = zw.initialize(module, sgd(list(module.parameters())), config(stage, "eager", deadline=8.0))
    model.micro(engine, engine.module, model.batch(dist.get_rank(), 0), engine.backward)
    if dist.get_rank() == 1:
        time.sleep(60)
    engine.step()
    return int(engine.global_steps)


@pytest.mark.matrix
def test_a_rank_that_misses_the_deadline(disposable: Disposable) -> None:
    start = time.time()
    outcomes = disposable(2).outcomes(skip_the_step, 2)
    assert outcomes[0].failed and "rank 1" in outcomes[0].message + outcomes[0].stderr, outcomes[0].describe()
    assert outcomes[0].kind in (None, "AgreementError")
    assert outcomes[0].ended - start < patient(20)


def branch_on_one_rank() -> int:
    """Stage 3: rank 0 enters a module that the others do not."""
    model = entry("branch_on_one_rank")
    module = build(model)
    engine = zw.initialize(module, sgd(list(module.parameters())), config(3, "eager", deadline=8.0))
    for step in range(2):
        model.micro(engine, engine.module, model.batch(dist.get_rank(), step), engine.backward)
        engine.step()
    return int(engine.global_steps)


def test_a_branch_on_one_rank_at_stage_3(disposable: Disposable) -> None:
    """gloo itself ends a process that receives a message of the wrong size; the other rank gets an error."""
    outcomes = disposable(2).outcomes(branch_on_one_rank)
    for outcome in outcomes:
        assert outcome.failed, f"rank {outcome.rank} trained on: {outcome.value} steps"
        assert re.search("rank|mismatch", outcome.message + outcome.stderr), outcome.describe()


class Ordered(Stack):
    """Equal blocks, called in another order on rank 1: the same collectives in number and size."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 1, 2, 3) if dist.get_rank() == 0 else (0, 2, 1, 3)
        x = self.enter(x)
        for index in order:
            x = self.blocks[index](x)
        return self.leave(x)


def order_on_one_rank(stage: int, mode: str) -> int:
    torch.manual_seed(0)
    module = Ordered()
    with zw.initialize(module, sgd(list(module.parameters())), config(stage, mode, deadline=8.0)) as engine:
        for step in range(2):
            x, y = rows(dist.get_rank(), step)
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
        return int(engine.global_steps)


@pytest.mark.matrix
@daily("mode", ["aot_eager"], ["eager"])
def test_another_order_on_one_rank_at_stage_3(disposable: Disposable, mode: str) -> None:
    outcomes = disposable(2).outcomes(order_on_one_rank, 3, mode)
    for outcome in outcomes:
        assert outcome.failed, f"rank {outcome.rank} trained on: {outcome.value} steps"
        assert "rank" in outcome.message + outcome.stderr, outcome.describe()
    told = [
        o for o in outcomes if re.search("different collectives|AgreementError", f"{o.kind} {o.message} {o.stderr}")
    ]
    assert told, "\n".join(outcome.describe() for outcome in outcomes)


def raise_in_different_places() -> None:
    """Every rank raises, but not in the same place: not the same failure, so not one to go on from."""
    model = entry("mlp")
    module = build(model)
    with zw.initialize(module, sgd(list(module.parameters())), config(3, "eager")) as engine:
        x, y = rows(dist.get_rank(), 0)
        if dist.get_rank() == 0:
            engine(x[:, :3])
        else:
            engine.step()
        engine.backward(F.mse_loss(engine(x), y))


def test_exceptions_in_different_places(disposable: Disposable) -> None:
    outcomes = disposable(2).outcomes(raise_in_different_places)
    assert all(outcome.failed for outcome in outcomes), "\n".join(outcome.describe() for outcome in outcomes)


class Odd(nn.Module):
    """Built differently on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4 + dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def disagree_at_the_start() -> None:
    """Ranks that bring different models or configs: the same error everywhere, and the next engine works."""
    for make, settings in (
        (Odd, config(3, "eager")),
        (lambda: Stack(lambda i: Block()), config(2 + dist.get_rank(), "eager")),
    ):
        with pytest.raises(zw.ZeroweaveError, match="rank"):
            zw.initialize(make(), None, settings)
    with zw.initialize(Stack(lambda index: Block()), None, config(3, "eager")) as engine:
        engine(rows(0, 0)[0])


@pytest.mark.matrix
def test_different_models_or_configs(disposable: Disposable) -> None:
    disposable(2).run(disagree_at_the_start)
