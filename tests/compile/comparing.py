"""One step of a model, compiled over a fake host, beside plain PyTorch in fp32 and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.fakes import FakeHost
from tests.support.reference import Exactly, Expected, doubled, judge

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding stack and a head; `way` is a form of checkpointing."""

    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 3, way: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(count)])
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.way == "reentrant") if self.way else layer(x)
        return x


class TakesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ other


class EarlyTranspose(nn.Module):
    """The first layer's weight, transposed early, is an argument of every later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TakesWeight() for _ in range(3)])
        self.resident: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.resident():
            early = self.layers[0].inner.weight.t()
        for layer in self.layers:
            x = layer(x, early)
        return x


def loss_of(y: Any) -> Tensor:
    outputs = y if isinstance(y, tuple) else (y,)
    return sum(out.float().square().mean() * (i + 1) for i, out in enumerate(outputs))  # type: ignore[return-value]


def compare(
    model: nn.Module,
    *inputs: Tensor,
    lower: str = "aot_eager",
) -> FakeHost:
    """One step, eager and compiled: output, input gradients and parameter gradients must be equal."""
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    host = FakeHost(model, lower)
    if isinstance(model, EarlyTranspose):
        model.resident = host.everything
    results = []
    for m in (reference, exact, model):
        torch.manual_seed(1)
        leaves = [x.clone() for x in (doubled(inputs) if m is exact else inputs)]
        for x in leaves:
            x.requires_grad_(x.is_floating_point())
        with host.hooks() if m is model else nullcontext(), Exactly() if m is exact else nullcontext():
            y = m(*leaves)
        with Exactly() if m is exact else nullcontext():
            loss_of(y).backward()
        found = {f"output {i}": out.detach() for i, out in enumerate(y if isinstance(y, tuple) else (y,))}
        found |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}
        results.append(found | (gradients_of(host) if m is model else {n: p.grad for n, p in m.named_parameters()}))
    agree(results[2], Expected(*results[:2]))
    assert host.settled() and host.ran > 0
    return host


def gradients_of(host: FakeHost) -> dict[str, Tensor | None]:
    return {name: host.gradient(name) for name, _ in host.model.named_parameters()}


def agree(own: Mapping[str, Tensor | None], expected: Expected) -> None:
    for name, value in expected.plain.items():
        assert value is None or own[name] is None or own[name].dtype == value.dtype, name
    found = judge(own, expected)
    assert found[0] <= 1, found


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))
