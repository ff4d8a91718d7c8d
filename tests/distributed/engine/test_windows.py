"""Windows: plain backwards, exceptions on all ranks, zero_grad, and forwards that are never differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, daily, slow
from tests.support.models import entry
from tests.support.reference import (
    CHECKED,
    TRAINED,
    build,
    draw,
    judge,
    judge_numbers,
    set_lr,
    sgd,
    train_reference,
)
from tests.support.zoo import Block, Entry, Stack, rows


def config(stage: int, mode: str, gas: int = 1) -> dict[str, Any]:
    steps = {"gradient_accumulation_steps": gas}
    return {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0, **steps}


def started(model: Entry, settings: dict[str, Any]) -> Any:
    module = build(model)
    return zw.initialize(module, sgd([p for p in module.parameters() if p.requires_grad]), settings)


def data(index: int) -> tuple[Tensor, Tensor]:
    draw(dist.get_rank(), index)
    return rows(dist.get_rank(), index)


def plain_backward(stage: int, mode: str) -> list[tuple[float, str]]:
    """`loss.backward()` divides nothing, `engine.scale(loss).backward()` and `engine.backward` divide by the window."""
    model, gas = entry("mlp"), 2
    expected = train_reference(model, gas, steps=CHECKED)
    differences = []
    with started(model, config(stage, mode, gas)) as engine:
        for step in range(CHECKED):
            for index in range(step * gas, (step + 1) * gas):
                x, y = data(index)
                loss = F.mse_loss(engine(x), y)
                (loss / gas if step == 0 else engine.scale(loss)).backward()
                if index % gas == gas - 1:
                    differences.append(judge(engine.gradients(), expected.gradients[step]))
                engine.step()
    return differences


@slow("2-aot_eager")
@daily(("stage", "mode"), [(2, "aot_eager"), (3, "eager")], [(1, "eager"), (3, "aot_eager")])
def test_plain_and_scaled_backward(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(plain_backward, stage, mode):
        assert max(differences)[0] <= 1, differences


def train_steps(stage: int, mode: str) -> list[tuple[float, str]]:
    """`train_step(batch, loss_fn)` is forward, backward and step."""
    model, gas = entry("mlp"), 2
    expected = train_reference(model, gas)
    losses = []
    with started(model, config(stage, mode, gas)) as engine:
        for step in range(CHECKED + TRAINED):
            set_lr(engine.optimizer, step, model.lr)
            for index in range(step * gas, (step + 1) * gas):
                x, y = data(index)
                losses.append(float(engine.train_step((x,), lambda out, batch, y=y: F.mse_loss(out, y))))
        assert engine.global_steps == CHECKED + TRAINED and engine.micro_steps == gas * engine.global_steps
        with engine.full_parameters() as full:
            return [judge(full, expected.parameters), judge_numbers(losses, expected.losses)]


@pytest.mark.matrix
@daily(("stage", "mode"), [(3, "aot_eager")], [(2, "eager")])
def test_train_step(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(train_steps, stage, mode):
        assert max(differences)[0] <= 1, differences


class Tripping(torch.autograd.Function):
    """The identity, which raises in its backward where told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: bool) -> Tensor:
        ctx.trip = trip
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.trip:
            raise ValueError("tripped in backward")
        return gradients[0], None


class TrippingStack(Stack):
    """Raises in its forward or its backward, between blocks, when `trip` says so."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())
        self.trip = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                if self.trip == "forward":
                    raise ValueError("tripped in forward")
                x = Tripping.apply(x, self.trip == "backward")
        return self.leave(x)


TRIPPING = Entry("tripping", TrippingStack, rows, entry("mlp").micro)


def tripped(stage: int, mode: str, place: str, gas: int) -> tuple[list[tuple[float, str]], tuple[float, str]]:
    """The same exception on all ranks in the last backward of a window, then `zero_grad()` and the window anew.

    It happens in the first, recorded step and in a later, replayed one.
    """
    expected = train_reference(TRIPPING, gas)
    differences = []
    with started(TRIPPING, config(stage, mode, gas)) as engine:
        module: nn.Module = engine.module
        for step in range(CHECKED + TRAINED):
            set_lr(engine.optimizer, step, TRIPPING.lr)
            for attempt in (True, False) if step in (0, 2, CHECKED) else (False,):
                for index in range(step * gas, (step + 1) * gas):
                    last = index == (step + 1) * gas - 1
                    module.trip = place if attempt and last else ""  # type: ignore[assignment]
                    x, y = data(index)
                    if module.trip:
                        with pytest.raises(ValueError, match=f"tripped in {place}"):
                            engine.backward(F.mse_loss(engine(x + 1), y))
                        engine.zero_grad()
                        break
                    engine.backward(F.mse_loss(engine(x), y))
                    if step < CHECKED and last:
                        differences.append(judge(engine.gradients(), expected.gradients[step]))
                    engine.step()
        assert engine.global_steps == CHECKED + TRAINED
        with engine.full_parameters() as full:
            return differences, judge(full, expected.parameters)


TRIPS = [
    (1, "eager", "forward", 1),
    (2, "aot_eager", "forward", 2),
    (3, "eager", "forward", 1),
    (3, "aot_eager", "forward", 2),
]
TRIPS += [(1, "aot_eager", "backward", 2), (2, "eager", "backward", 2), (3, "eager", "backward", 1)]
TRIPS += [(3, "aot_eager", "backward", 2)]


@pytest.mark.matrix
@daily(("stage", "mode", "place", "gas"), TRIPS[2:7:4], [*TRIPS[:2], *TRIPS[3:6], TRIPS[7]])
def test_an_exception_on_all_ranks(pools: Pools, stage: int, mode: str, place: str, gas: int) -> None:
    for gradients, parameters in pools(2).run(tripped, stage, mode, place, gas):
        assert max(gradients)[0] <= 1 and parameters[0] <= 1, (gradients, parameters)


def dropped(stage: int, mode: str) -> list[tuple[float, str]]:
    """`zero_grad()` in the middle of a window drops it; a forward in eval mode and one under no_grad leave no trace."""
    model, gas = entry("dropout"), 2
    expected = train_reference(model, gas, steps=CHECKED)
    differences = []
    with started(model, config(stage, mode, gas)) as engine:
        for step in range(CHECKED):
            x, y = data(1000 + step)
            if step != 1:
                engine.backward(F.mse_loss(engine(x), y))
                engine.zero_grad()
            with torch.no_grad():
                engine.eval()
                assert torch.equal(engine(x), engine(x)), "dropout in eval mode"
                engine.train()
                assert not torch.equal(engine(x), engine(x)), "no dropout in train mode"
            engine(x)
            for index in range(step * gas, (step + 1) * gas):
                x, y = data(index)
                engine.backward(F.mse_loss(engine(x), y))
                if index % gas == gas - 1:
                    differences.append(judge(engine.gradients(), expected.gradients[step]))
                engine.step()
    return differences


@pytest.mark.matrix
@daily(("stage", "mode"), [(2, "aot_eager"), (3, "eager")], [(1, "eager"), (3, "aot_eager")])
def test_zero_grad_and_forwards_without_backward(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(dropped, stage, mode):
        assert max(differences)[0] <= 1, differences
