"""Gradients that exist on some ranks only: zeros elsewhere, in the turn that all ranks agreed on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.reference import Plain, judge

SETTINGS = [(1, "eager"), (2, "aot_eager"), (3, "eager"), (3, "aot_eager")]


class Gated(nn.Module):
    """A block with a branch that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b(torch.tanh(self.a(x)))
        return y + self.gate(x) if self.use else y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made(stage: int, mode: str, **more: Any) -> tuple[Plain, Stack, Any]:
    """The plain model, its equal under the engine, and the engine."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Stack())
    plain, model = models
    settings = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0, **more}
    return Plain(plain, sgd), model, zw.initialize(model, sgd(model.parameters()), settings)


def branch_on_one_rank(stage: int, mode: str, which: int) -> tuple[list[tuple[float, str]], int, int, bool]:
    """After a first step with all branches, one block uses its own on rank 0 only."""
    plain, model, engine = made(stage, mode)
    errors = []
    with engine:
        for index in range(4):
            for module in (*plain.nets, model):
                module.blocks[which].use = index == 0 or dist.get_rank() == 0
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
            plain.each(lambda net, x: net(x).pow(2).mean().backward(), x)
            expected = plain.average()
            plain.step()
            engine.backward(engine(x).pow(2).mean())
            errors.append(judge(engine.gradients(), expected))
            engine.step()
        same = engine.executed == engine.schedule.instructions
        return errors, engine.stats.departures, engine.stats.on_demand_unshards, same


@daily("which", [2], [0, 3])
@pytest.mark.parametrize(("stage", "mode"), SETTINGS)
def test_a_parameter_used_on_one_rank(pools: Pools, stage: int, mode: str, which: int) -> None:
    for errors, departures, on_demand, same in pools(2).run(branch_on_one_rank, stage, mode, which):
        assert max(errors)[0] <= 1, errors
        assert (departures, on_demand) == (0, 0) and same


def sometimes(net: Any, x: Tensor, index: int) -> Tensor:
    """A loss which on rank 1 reaches no parameter at odd indices."""
    loss = net(x).pow(2).mean()
    return x.clone().requires_grad_().sum() if dist.get_rank() == 1 and index % 2 else loss


def loss_on_one_rank(stage: int, mode: str, synced: bool) -> tuple[list[tuple[float, str]], int]:
    """On rank 1 the loss of every other step reaches no parameter."""
    plain, _, engine = made(stage, mode)
    errors = []
    with engine:
        for index in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
            plain.each(lambda net, x, index: sometimes(net, x, index).backward(), x, index)
            expected = plain.average()
            plain.step()
            with contextlib.nullcontext() if synced else engine.no_sync():
                engine.backward(sometimes(engine, x, index))
            if synced:
                errors.append(judge(engine.gradients(), expected))
            engine.step()
        with engine.full_parameters() as full:
            errors.append(judge(full, plain.values()))
        return errors, engine.global_steps


@pytest.mark.parametrize("synced", [True, False])
@daily(("stage", "mode"), [(2, "aot_eager")], [(1, "eager")])
def test_a_loss_that_reaches_no_parameter_on_one_rank(pools: Pools, stage: int, mode: str, synced: bool) -> None:
    for errors, steps in pools(2).run(loss_on_one_rank, stage, mode, synced):
        assert max(errors)[0] <= 1, errors
        assert steps == 4


class Probing(nn.Module):
    """Looks at gradients of its inputs, or of its own parameters, inside the forward."""

    def __init__(self, probe: str) -> None:
        super().__init__()
        self.net, self.probe = Stack(), probe

    def forward(self, x: Tensor) -> Tensor:
        if self.probe == "double":
            x = x.clone().requires_grad_()
            value = self.net(x).tanh().sum()
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            return 0.1 * value + slope.pow(2).mean()
        if self.probe == "parameter":
            loss = self.net(x).pow(2).mean()
            (slope,) = torch.autograd.grad(loss, self.net.end.weight, retain_graph=True)
            return loss * (1 + slope.detach().norm())
        with torch.enable_grad():
            near = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(near).sum(), near)
        return self.net(x + slope).pow(2).mean()


def probed(stage: int, mode: str, probe: str) -> tuple[list[tuple[float, str]], list[int], int, str]:
    module, model = Probing(probe), Probing(probe)
    model.load_state_dict(module.state_dict())
    plain = Plain(module)
    settings = {"stage": stage, "compile": MODES[mode], "gradient_accumulation_steps": 2, "deadline_seconds": 200.0}
    errors, scatters, refused = [], [], ""
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), settings) as engine:
        for index in range(3):
            with engine.full_parameters() as full, torch.no_grad():
                for net in plain.nets:
                    for name, parameter in net.named_parameters():
                        parameter.copy_(full[name])
            for micro in range(2):
                seed = 100 * index + 10 * micro + dist.get_rank()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
                if index == 2 and micro == 0:
                    engine(x)
                    try:
                        engine.step()  # the probe is no backward of the window
                    except zw.errors.EngineError as error:
                        refused = str(error)
                plain.each(lambda net, x: (net(x) / 2).backward(), x)
                engine.backward(engine(x))
                if micro == 1:
                    errors.append(judge(engine.gradients(), plain.average()))
                    plain.zero_grad()
                engine.step()
            scatters.append(engine.stats.last_step["reduce_scatter"].calls)
        return errors, scatters, len([b for b in engine.buckets if b.trainable]), refused


PROBES = [(*s, p) for s in SETTINGS for p in ("input", "parameter", "double") if s[1] == "eager" or p == "input"]


@daily(("stage", "mode", "probe"), PROBES[::3], [each for each in PROBES if each not in PROBES[::3]])
def test_gradients_taken_inside_a_forward(pools: Pools, stage: int, mode: str, probe: str) -> None:
    for errors, scatters, buckets, refused in pools(2).run(probed, stage, mode, probe):
        assert max(errors)[0] <= 1, errors
        assert set(scatters) == {buckets * (1 if stage == 1 else 2)}
        assert refused.startswith("[ZW402] step() without a backward")
