"""Local sums of parameters that some ranks only have gradients of: all ranks reduce them in one dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine.coalescing import EPSILON, Setting, distance, initialize
from tests.support.harness import Pools
from tests.support.reference import build, draw
from tests.support.zoo import WIDTH, Block, Entry, Stack, regression, rows


class Branching(Stack):
    """A stack, and behind it one layer for each rank, which the other ranks do not use."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block(), depth=2)
        self.own = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.branches = True

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.own[dist.get_rank()](x) if self.branches else x


BRANCHING = Entry("branching", Branching, rows, regression)
N = 3
USES = {"always": (True, True, True), "first": (True, False, False), "last": (False, False, True)}


def loss(call: Any, index: int) -> Tensor:
    draw(dist.get_rank(), index)
    x, y = rows(dist.get_rank(), index)
    return F.mse_loss(call(x.bfloat16()).float(), y) / N


def uneven(setting: Setting, how: str) -> list[float]:
    """How far each window's gradients are from the sum in fp64, for every way to use the branch."""
    found = []
    with initialize(build(BRANCHING), setting.config(gradient_accumulation_steps=1)) as engine:
        for uses in USES.values():
            module = build(BRANCHING).bfloat16()
            sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in module.named_parameters()}
            for index, branches in enumerate(uses):
                module.branches = branches
                loss(module, index).backward()
                for name, p in module.named_parameters():
                    if p.grad is not None:
                        sums[name] += p.grad.double()
                        p.grad = None
            for total in sums.values():
                dist.all_reduce(total)
                total /= dist.get_world_size()

            def backward(index: int, branches: bool) -> None:
                engine.module.branches = branches
                engine.set_gradient_accumulation_boundary(index == N - 1)
                engine.backward(loss(engine, index))

            if how == "coalesced":
                with engine.coalesce_grad_reduction():
                    for index, branches in enumerate(uses):
                        backward(index, branches)
            else:
                for index, branches in enumerate(uses):
                    if how == "no_sync" and index < N - 1:
                        with engine.no_sync():
                            backward(index, branches)
                    else:
                        backward(index, branches)
            engine.set_gradient_accumulation_boundary(True)
            found.append(distance({k: v for k, v in engine.gradients().items() if v is not None}, sums))
            engine.step()
    return found


ROWS = [
    (1, "plain", "eager"),
    pytest.param(2, "coalesced", "aot_eager", marks=pytest.mark.matrix),
    pytest.param(2, "no_sync", "eager", marks=pytest.mark.matrix),
    pytest.param(1, "coalesced", "eager", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("stage", "how", "mode"), ROWS)
def test_a_branch_of_one_rank_only(pools: Pools, stage: int, how: str, mode: str) -> None:
    for found in pools(2).run(uneven, Setting(stage, mode, bucket="slot", params="bfloat16"), how):
        assert len(found) == len(USES) and max(found) <= EPSILON * N**0.5, found
