"""The sharded optimizer computes the bits of the unsharded one; clipping, schedulers and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.support.harness import Pool
from tests.support.marks import daily
from tests.support.models import entry
from tests.support.reference import NORM, SEED, Plain, build, draw, judge, judge_numbers, worst
from tests.support.zoo import Entry

STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "lion": (zw.Lion, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
}


def two_groups(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Matrices in one group, vectors in another with its own settings."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 1e-3, "weight_decay": 0.0},
    ]
    optimizer, settings = OPTIMIZERS[kind]
    return optimizer(groups, **settings)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": 200.0, **more}


def micro(engine: Any, model: Entry, index: int) -> None:
    draw(dist.get_rank(), index)
    model.micro(engine, engine.module, model.batch(dist.get_rank(), index), engine.backward)


def on_equal_gradients(name: str, kind: str, stage: int, clipping: float | None) -> tuple[list[str], list[float]]:
    """Names whose values differ in any bit from an unsharded optimizer fed with the engine's gradients; the norms."""
    model = entry(name)
    plain = build(model)
    unsharded = two_groups(plain, kind)
    sharded = build(model)
    norms = []
    with zw.initialize(sharded, two_groups(sharded, kind), config(stage, gradient_clipping=clipping)) as engine:
        for index in range(STEPS):
            micro(engine, model, index)
            gradients = engine.gradients()
            engine.step()
            assert engine.was_step_applied()
            for parameter_name, parameter in plain.named_parameters():
                gradient = gradients.get(parameter_name)
                parameter.grad = None if gradient is None else gradient.clone()
            if clipping is not None:
                norm = float(engine.get_global_grad_norm())
                whole = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients.values() if g is not None))
                assert abs(norm - whole) <= NORM * whole, (norm, whole)
                assert whole > clipping, "the test must clip"
                norms.append(norm)
                coefficient = torch.clamp(clipping / (torch.tensor(norm) + 1e-6), max=1.0)
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(coefficient)
            unsharded.step()
            unsharded.zero_grad()
        with engine.full_parameters():
            pairs = zip(plain.named_parameters(), engine.module.named_parameters(), strict=True)
            return [n for (n, a), (_, b) in pairs if not torch.equal(a.detach(), b.detach())], norms


@pytest.mark.matrix
@daily("stage", [3], [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bit_equal_on_equal_gradients(pools: Callable[[int], Pool], kind: str, stage: int) -> None:
    for name in ("mlp", "unused"):
        assert [different for different, _ in pools(2).run(on_equal_gradients, name, kind, stage, None)] == [
            [],
            [],
        ]


@daily("stage", [3], [1, 2])
def test_bit_equal_on_an_equal_clip_coefficient(pools: Callable[[int], Pool], stage: int) -> None:
    values = pools(2).run(on_equal_gradients, "mlp", "adamw", stage, 0.05)
    assert [different for different, _ in values] == [[], []]
    assert values[0][1] == values[1][1], "ranks clipped by different norms"


def clipped_by_hand(name: str, stage: int) -> tuple[tuple[float, str], tuple[float, str]]:
    """`engine.clip_grad_norm_` beside torch's on the same gradients: what `judge` says of parameters and norms."""
    model = entry(name)
    plain, sharded = Plain(build(model), lambda parameters: torch.optim.SGD(parameters, lr=0.1)), build(model)
    norms: list[list[float]] = [[], [], []]
    with zw.initialize(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), config(stage)) as engine:
        assert engine.get_global_grad_norm() is None
        for index in range(3):
            micro(engine, model, index)
            for parameter_name, gradient in engine.gradients().items():
                plain.nets[0].get_parameter(parameter_name).grad = None if gradient is None else gradient.clone()
            for exact_name, exact_parameter in plain.nets[1].named_parameters():
                gradient = plain.nets[0].get_parameter(exact_name).grad
                exact_parameter.grad = None if gradient is None else gradient.double()
            norms[0].append(float(engine.clip_grad_norm_(0.05)))
            engine.step()
            assert engine.get_global_grad_norm() == norms[0][-1]
            for net, seen in zip(plain.nets, norms[1:], strict=True):
                seen.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
            plain.step()
        with engine.full_parameters() as full:
            return judge(full, plain.values()), judge_numbers(norms[0], (norms[1], norms[2]))


@daily(
    ("name", "stage"),
    [("tied", 3), ("frozen_inside", 1)],
    [("mlp", 1), ("mlp", 2), ("mlp", 3), ("tied", 2), ("frozen_inside", 3)],
)
def test_clipping_called_by_the_user(pools: Callable[[int], Pool], name: str, stage: int) -> None:
    """Tied and frozen parameters included: torch counts the first once and the second not at all."""
    for difference, norms in pools(2).run(clipped_by_hand, name, stage):
        assert difference[0] <= 1 and norms[0] <= 1, (difference, norms)


def with_scheduler(stage: int, gas: int) -> tuple[list[float], list[float], tuple[float, str]]:
    """Learning rates seen by the engine's and by the reference's optimizer at each step; the parameters' difference."""
    model = entry("mlp")

    def prepare(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    plain, sharded = build(model), build(model, SEED + dist.get_rank())
    unsharded, plan = prepare(plain)
    optimizer, scheduler = prepare(sharded)
    settings = config(stage, gradient_accumulation_steps=gas)
    seen: tuple[list[float], list[float]] = [], []
    with zw.initialize(sharded, optimizer, settings, lr_scheduler=scheduler) as engine:
        assert engine.lr_scheduler is scheduler and engine.optimizer is optimizer
        for step in range(3):
            seen[0].append(engine.optimizer.param_groups[0]["lr"])
            seen[1].append(unsharded.param_groups[0]["lr"])
            for index in range(step * gas, (step + 1) * gas):
                micro(engine, model, index)
                gradients = engine.gradients() if index == (step + 1) * gas - 1 else {}
                engine.step()
            assert engine.global_steps == step + 1
            for name, gradient in gradients.items():
                plain.get_parameter(name).grad = gradient
            unsharded.step()
            plan.step()
        with engine.full_parameters() as full:
            return *seen, worst(full, dict(plain.named_parameters()))


@daily(("stage", "gas"), [(3, 2)], [(1, 1), (2, 3)])
def test_the_scheduler_follows_optimizer_steps(pools: Callable[[int], Pool], stage: int, gas: int) -> None:
    for engines, references, difference in pools(2).run(with_scheduler, stage, gas):
        assert engines == references == [0.1, 0.05, 0.1 / 3]
        assert difference[0] == 0.0, difference
