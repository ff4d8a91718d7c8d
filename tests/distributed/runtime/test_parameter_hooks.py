"""Hooks on parameters: each sees its whole local gradient of a backward once, before that is reduced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.reference import SEED, Plain, judge
from tests.support.zoo import Block, Stack, rows

SCALE = 8.0
Hook = Callable[[Tensor], Tensor | None]


class Shared(Stack):
    """Parameters that compiled regions and the root's own code use, under two names and several times."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block(), depth=3)
        self.blocks[2].mlp.up.weight = self.blocks[0].mlp.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.blocks[1](x))
        return x * self.blocks[1].mlp.down.bias + self.blocks[0].mlp.up.weight.sum(0) * self.enter.weight[0]


def halved_where_large(gradient: Tensor) -> Tensor:
    """No linear function, so that it tells a sum from its parts."""
    return torch.where(gradient.abs() > gradient.abs().mean(), gradient / 2, gradient)


def doubled_in_place(gradient: Tensor) -> None:
    gradient[0].mul_(2)


HOOKED: dict[str, list[Hook]] = {
    "blocks.0.mlp.up.weight": [halved_where_large, doubled_in_place],
    "blocks.1.mlp.down.bias": [doubled_in_place, halved_where_large],
    "blocks.1.norm.weight": [halved_where_large],
    "enter.weight": [halved_where_large],
    "leave.weight": [lambda gradient: gradient.mul_(0.5)],
    "leave.bias": [lambda gradient: None],
}


def hook(net: nn.Module, calls: list[str] | None = None) -> list[Any]:
    """Registers all of them, and what notes the calls; returns the handles of one that is to be removed."""

    def noting(name: str) -> Hook:
        return lambda gradient: calls.append(name) if calls is not None else None

    for name, hooks in HOOKED.items():
        net.get_parameter(name).register_hook(noting(name))
        for each in hooks:
            net.get_parameter(name).register_hook(each)
    return [net.get_parameter("blocks.2.norm.bias").register_hook(lambda gradient: gradient * 0)]


def trained(stage: int, mode: str, gas: int, before: bool, syncs: bool, keeps: bool) -> list[Any]:
    """Three steps; behind the second one of the hooks is removed, and behind all of them the engine destroyed."""
    torch.manual_seed(SEED)
    plain = Plain(Shared(), lambda parameters: torch.optim.SGD(parameters, 0.1))
    torch.manual_seed(SEED)
    net, calls = Shared(), list[str]()
    handles = [*hook(net, calls)] if before else []
    for each in plain.nets:
        handles += hook(each)
    config = {"stage": stage, "compile": MODES[mode], "gradient_accumulation_steps": gas}
    config |= {"precision": {"loss_scale": SCALE}, "deadline_seconds": 200.0}
    engine = zw.initialize(net, torch.optim.SGD(net.parameters(), 0.1), config)
    if not before:
        handles += hook(engine.module, calls)
    found: list[Any] = []
    for step in range(3):
        for index in range(gas):
            x, y = rows(dist.get_rank(), step * gas + index)
            calls.clear()
            with nullcontext() if syncs or index == gas - 1 else engine.no_sync():
                loss = (engine(x) - y).pow(2).mean()
                engine.backward(loss, retain_graph=keeps)
                if keeps:
                    engine.backward(loss)
            assert sorted(calls) == sorted([*HOOKED] * (1 + keeps)), calls
            if index < gas - 1:
                engine.step()

            def micro(net: nn.Module, x: Tensor, y: Tensor) -> None:
                loss = (net(x) - y).pow(2).mean() * SCALE / gas
                loss.backward(retain_graph=keeps)
                if keeps:
                    loss.backward()

            plain.each(micro, x, y)
        for net in plain.nets:
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad /= SCALE
        found.append(judge(engine.gradients(), plain.average()))
        engine.step()
        plain.step()
        if step == 1:
            for handle in handles:
                handle.remove()
    assert mode == "eager" or engine.stats.compiled_calls > 0
    values = plain.values()
    engine.destroy()
    found.append(judge(dict(engine.module.named_parameters()), values))
    calls.clear()
    engine.module(x).sum().backward()
    assert sorted(calls) == sorted(HOOKED)
    return found


@daily(
    ("world", "stage", "mode", "gas", "before", "syncs", "keeps"),
    [(2, 3, "aot_eager", 1, True, True, False), (2, 1, "eager", 3, False, False, False)],
    [
        (1, 1, "aot_eager", 3, False, True, False),
        (1, 2, "eager", 1, True, True, True),
        (2, 1, "aot_eager", 3, True, True, False),
        (2, 2, "aot_eager", 3, False, False, False),
        (2, 2, "aot_eager", 1, True, True, True),
        (2, 3, "eager", 3, False, True, False),
        (3, 2, "eager", 3, False, True, False),
        (3, 3, "aot_eager", 3, True, False, True),
    ],
)
def test_hooks_see_whole_local_gradients(
    pools: Pools, world: int, stage: int, mode: str, gas: int, before: bool, syncs: bool, keeps: bool
) -> None:
    for differences in pools(world).run(trained, stage, mode, gas, before, syncs, keeps):
        assert max(differences)[0] <= 1, differences
