"""Regions that Dynamo cannot compile: exact, eager, and explained."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compile.comparing import agree, gradients_of
from tests.compile.fakes import FakeHost
from tests.support.reference import Plain
from zeroweave.compile.fallback import differences
from zeroweave.compile.regions import region_key

pytestmark = pytest.mark.oldest


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Indexed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x))) / (1 + self.layer_idx)


class Disabled(Layer):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DisabledLinear(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class PartlyDisabled(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.one = DisabledLinear(8, 8)


class Recurrent(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Branching(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h = torch.tanh(h) if h.sum() > 0 else torch.sigmoid(h)
        return x + self.two(h)


class BrokenIndexed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x) / (1 + self.layer_idx)
        torch._dynamo.graph_break()
        return x + self.two(h)


def run(make: Any, count: int, limit: int = 8) -> tuple[FakeHost, list[int], list[str]]:
    """The templates that ran in each block's forward, and the reasons of those that ran none."""
    torch.manual_seed(0)
    model = nn.ModuleList([make(i) for i in range(count)])
    plain = Plain(copy.deepcopy(model))
    host = FakeHost(model, recompile_limit=limit)
    x = torch.randn(2, 3, 8)
    y = x.clone().requires_grad_()
    calls, reasons = [], []
    for layer in model:
        before = host.ran
        y = layer(y)
        calls.append(host.ran - before)
        if not calls[-1]:
            reasons.append(host.templates.fallback_reason(region_key(layer), layer))
    plain.each(lambda net, x: functools.reduce(lambda y, layer: layer(y), net, x).square().sum().backward(), x)
    with host.everything():
        y.square().sum().backward()
    agree(gradients_of(host), plain.gradients())
    assert host.settled()
    return host, calls, reasons


@pytest.mark.matrix
def test_more_variants_than_the_limit() -> None:
    host, calls, reasons = run(Indexed, 10)
    assert calls == [1] * 8 + [0] * 2 and host.templates.graphs == 8
    assert len(reasons) == 2 and "compile.recompile_limit" in reasons[0] and "use_cache=False" in reasons[0]
    assert "What differs between the copies: module.layer_idx (0, 1, 2, 3, …)." in reasons[0]
    assert run(Indexed, 4, limit=2)[1] == [1, 1, 0, 0]
    assert run(Indexed, 10, limit=10)[1] == [1] * 10


def test_what_differs_is_told_once_with_its_values() -> None:
    size = "tensor 'x' size mismatch at index 1. expected 16, actual 24"
    reasons = [f"0/{i}: module.layer_idx == {i}   # return x (HINT: none)\nUser stack trace:\n  run" for i in range(6)]
    reasons += [f"0/0: {size}", f"0/1: {size}", "0/1: module.way == 'sum'  # code"]
    assert differences(reasons) == ["module.layer_idx (0, 1, 2, 3, …)", size, "module.way ('sum')"]
    assert differences([]) == []


@pytest.mark.matrix
def test_the_limit_counts_within_one_engine() -> None:
    for _ in range(10):
        assert run(Layer, 2)[1] == [1, 1]


def test_a_disabled_forward() -> None:
    _, calls, reasons = run(Disabled, 3)
    assert calls == [0, 0, 0] and all("torch.compiler.disable" in reason for reason in reasons)


def test_a_disabled_submodule_leaves_the_rest_compiled() -> None:
    host, calls, _ = run(PartlyDisabled, 3)
    assert calls == [1, 1, 1] and host.templates.graphs == 1


def test_an_lstm() -> None:
    _, calls, reasons = run(Recurrent, 3)
    assert calls == [0, 0, 0] and all("LSTM" in reason for reason in reasons)


def test_a_branch_on_data_compiles_both_ways_apart() -> None:
    host, calls, _ = run(Branching, 3)
    assert all(n == 2 for n in calls) and host.templates.graphs <= 3


@pytest.mark.matrix
def test_variants_of_a_broken_forward_share_one_limit() -> None:
    _, calls, reasons = run(BrokenIndexed, 10)
    assert min(calls[:8]) > 0
    assert all("recompile_limit" in reason for reason in reasons), (calls, reasons)


def test_nothing_to_compile_or_switched_off() -> None:
    torch.compiler.set_stance("force_eager")
    try:
        _, calls, reasons = run(Layer, 2)
    finally:
        torch.compiler.set_stance("default")
    assert calls == [0, 0] and "switched off" in reasons[0]


def test_variants_of_other_engines_are_named_once() -> None:
    reasons = [f"3/{n}: BACKEND_MATCH failure: torch.compile detected different backend callables. {n}" for n in (1, 2)]
    assert differences(reasons) == ["the engine that compiled them"]
