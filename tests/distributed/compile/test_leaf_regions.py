"""Regions that the config names decide the buckets, compiled or not: ranks may run different parts of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.reference import average

WIDTH, STEPS = 8, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Choose(nn.Module):
    """Runs other experts on each rank, and another number of them; `breaks`: each in a frame of its own."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        for expert in ([0], [2, 1])[dist.get_rank() % 2]:
            if self.breaks:
                torch._dynamo.graph_break()
            x = x + self.experts[expert](x)
        return x


class Layer(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(WIDTH, WIDTH), Choose(breaks)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.first(x).tanh())


class Model(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(breaks) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def trained(stage: int, mode: str, breaks: bool, bytes_: int | None, frozen: bool) -> tuple[list[str], int]:
    """Buckets and compiled calls of an engine that has trained as all-reduced plain PyTorch does, in float64."""
    torch.manual_seed(0)
    model = Model(breaks).double()
    for layer in model.layers:
        layer.moe.experts.requires_grad_(not frozen)
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(2, WIDTH, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in inputs:
        optimizer.zero_grad(set_to_none=False)
        reference(x).square().mean().backward()
        for p in reference.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        average(reference.named_parameters())
        optimizer.step()
    config: dict[str, Any] = {
        "stage": stage,
        "compile": {**MODES[mode], "regions": ["layers.*.moe"]},
        "deadline_seconds": 120.0,
    }
    if bytes_ is not None:
        config["bucket"] = {"bytes": bytes_}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config) as engine:
        for x in inputs:
            engine.backward(engine(x).square().mean())
            engine.step()
        with engine.full_parameters():
            for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(
                    p.detach().clone(), expected.detach(), msg=lambda text, n=name: f"{n}: {text}"
                )
        return [b.name for b in engine.buckets], engine.stats.compiled_calls


@pytest.mark.parametrize(
    ("stage", "mode", "breaks", "bytes_", "frozen"),
    [
        (3, "eager", False, None, False),
        (3, "eager", False, 2048, True),
        (3, "aot_eager", True, None, False),
        *(
            pytest.param(stage, mode, breaks, bytes_, frozen, marks=pytest.mark.matrix)
            for stage in (1, 2, 3)
            for mode in MODES
            for breaks in ((False,) if mode == "eager" else (False, True))
            for bytes_, frozen in ((None, False), (2048, True), (2048, False))
        ),
    ],
)
def test_ranks_run_different_parts(
    pools: Pools, stage: int, mode: str, breaks: bool, bytes_: int | None, frozen: bool
) -> None:
    for buckets, calls in pools(2).run(trained, stage, mode, breaks, bytes_, frozen):
        assert (calls > 0) == (mode != "eager")
        if bytes_ is None:
            assert buckets == ["layers.0", "layers.0.moe", "layers.1", "layers.1.moe", "last"]
        else:
            assert any(name.startswith("layers.0.moe:") for name in buckets)


def test_buckets_are_as_ever_without_patterns() -> None:
    model = Model(False)
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"compile": {"enabled": False}}) as e:
        assert [b.name for b in e.buckets] == ["layers.0", "layers.1", "last"]
