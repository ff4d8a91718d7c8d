"""Parametrizations that a forward registers and removes, as PEFT's `target_parameters` do with experts' weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zeroweave as zw
from tests.support.marks import MODES, daily
from tests.support.reference import Plain, judge
from tests.support.zoo import WIDTH, rows


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.einsum("bi,eio->bo", x, self.weight))


class Added(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Adapted(nn.Module):
    """Its parametrization sets the frozen weight to itself, which counts as a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Experts()
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        lowered = self.down.weight.view(2, 2, WIDTH).transpose(1, 2)
        parametrize.register_parametrization(
            self.base, "weight", Added(lowered @ self.up.weight.view(WIDTH, 2, 2).permute(2, 1, 0))
        )
        try:
            with parametrize.cached():
                return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def adapters(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


@daily(
    ("stage", "mode"),
    [(3, "eager")],
    [(1, "eager"), (2, "eager"), (1, "aot_eager"), (2, "aot_eager"), (3, "aot_eager")],
)
def test_weights_that_are_parametrized_for_a_call(stage: int, mode: str) -> None:
    torch.manual_seed(2)
    plain = Plain(nn.Sequential(*(Adapted() for _ in range(2))))
    optimizers = [torch.optim.SGD(adapters(net), 0.1) for net in plain.nets]
    model: Any = copy.deepcopy(plain.nets[0])
    config = {"stage": stage, "compile": MODES[mode]}
    with zw.initialize(model, torch.optim.SGD(adapters(model), 0.1), config) as engine:
        for step in range(3):
            x, y = rows(0, step)
            engine.backward((engine(x) - y).square().mean())
            engine.step()
            plain.each(lambda net, x, y: (net(x) - y).square().mean().backward(), x, y)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with engine.full_parameters() as full:
            used, told = judge(full, plain.values())
    assert used <= 1, told
