"""Ranks that would update by different options are told, and nothing is written. Equal ones may come in many ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.optim.low_precision import MLP, adamw, loss_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.reference import build

STAGES = [1, 2, 3]


# ---------------------------------------------------------------------- ranks that differ
def by_its_own_loss(engine: zw.Engine) -> None:
    """As ReduceLROnPlateau does that looks at a rank's own loss."""
    if dist.get_rank() == 1:
        engine.optimizer.param_groups[0]["lr"] *= 0.5


def other_decay(engine: zw.Engine) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1 * dist.get_rank()


def other_norm(engine: zw.Engine) -> None:
    engine.clip_grad_norm_(1.0 + dist.get_rank())


DIFFERENT = {
    by_its_own_loss: "'lr' of param_groups[0] is 0.001 on rank 0, 0.0005 on rank 1",
    other_decay: "'weight_decay' of param_groups[0] is 0.0 on rank 0, 0.1 on rank 1",
    other_norm: "'max_norm' of clip_grad_norm_ is 1.0 on rank 0, 2.0 on rank 1",
}


def differ(stage: int, mode: str, change: Callable[[zw.Engine], None]) -> tuple[str, bool]:
    """What the third step raises behind `change`, and whether it has written nothing. Then all are alike again."""
    module = build(MLP)
    with zw.initialize(module, adamw(list(module.parameters())), settings(stage, mode)) as engine:
        for index in range(3):
            engine.backward(loss_of(engine, index, torch.float32))
            if index < 2:
                engine.step()
        before = [engine.local(name).clone() for name, _ in module.named_parameters()]
        change(engine)
        with pytest.raises(zw.AgreementError) as caught:
            engine.step()
        engine.zero_grad()
        engine.optimizer.param_groups[0].update(lr=0.001, weight_decay=0.01)
        after = [engine.local(name) for name, _ in module.named_parameters()]
        engine.backward(loss_of(engine, 2, torch.float32))
        engine.step()
        return str(caught.value), engine.was_step_applied() and all(map(torch.equal, before, after))


@daily(
    ("stage", "mode", "change"),
    [(2, "eager", by_its_own_loss)],
    [(stage, mode, change) for stage in STAGES for mode in MODES for change in DIFFERENT],
)
def test_ranks_that_differ_are_told(pools: Pools, stage: int, mode: str, change: Any) -> None:
    for message, same in pools(2).run(differ, stage, mode, change):
        assert message.startswith("[ZW505] step 2: the ranks would update by different options"), message
        assert DIFFERENT[change] in message and same, message


# ---------------------------------------------------------------------- ranks that are alike
class Counting(torch.optim.Optimizer):
    """SGD that counts, in its groups, the steps in which it had gradients, and the elements that it has updated."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0, "elements": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            having = [p for p in group["params"] if p.grad is not None and p.numel()]
            group["step"] += len(having) > 0
            for p in having:
                group["elements"] += p.numel()
                p.add_(p.grad, alpha=-group["lr"])


def alike(stage: int, mode: str) -> int:
    """Ranks have equal options at each step, and come to them at other times, by other classes, or with a detour."""
    rank, steps = dist.get_rank(), 0
    module = build(MLP)
    small, *rest = sorted(module.parameters(), key=Tensor.numel)
    optimizer = torch.optim.AdamW([{"params": [small], "seen": 0}, {"params": rest}], lr=1e-3)
    with zw.initialize(module, optimizer, settings(stage, mode, gradient_accumulation_steps=2)) as engine:
        for index in range(12):
            rate = 0.02 / (1 + index)
            for group in optimizer.param_groups if rank == 0 else ():
                group["lr"], group["betas"], group["weight_decay"] = rate, (0.9, 0.95), 0.0
            for micro in range(2):
                loss = loss_of(engine, 2 * index + micro, torch.float32)
                if rank == 1:  # in the middle of the window, late, and only for a while
                    time.sleep(0.02)
                    optimizer.param_groups[1]["lr"] = 10.0
                engine.backward(loss)
                for group in optimizer.param_groups if rank == 1 else ():
                    group["lr"] = np.nextafter(rate, 1) if index % 2 else torch.tensor(rate)
                    group["betas"], group["weight_decay"], group["seen"] = [0.9, 0.95], 0, index
                engine.step()
                steps += engine.was_step_applied()
    return steps


def counting(stage: int, mode: str) -> int:
    """An optimizer that keeps in its groups what it counts: of a group whose elements a rank does not have, nothing."""
    module, steps = build(MLP), 0
    small, *rest = sorted(module.parameters(), key=Tensor.numel)
    with zw.initialize(
        module, zw.element_wise(Counting([{"params": [small]}, {"params": rest}], 1e-2)), settings(stage, mode)
    ) as engine:
        for index in range(4):
            engine.backward(loss_of(engine, index, torch.float32))
            engine.step()
            steps += engine.was_step_applied()
    return steps


@daily(("stage", "mode"), [(2, "eager")], [(stage, mode) for stage in STAGES for mode in MODES])
def test_equal_options_may_come_in_many_ways(pools: Pools, stage: int, mode: str) -> None:
    assert pools(2).run(alike, stage, mode) == [12, 12] and pools(2).run(counting, stage, mode) == [4, 4]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.frozen = nn.Linear(8, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.expert((self.first(x) + self.frozen(x)).tanh()))
        return out


def apart(stage: int) -> int:
    """Experts have rates of their own, and so have frozen parameters, whose rate nobody uses."""
    torch.manual_seed(0)
    model, number = Mixed(), dist.get_rank() % 2
    for parameter in model.expert.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    shared = [*model.first.parameters(), *model.last.parameters()]
    of_others = [{"params": list(part.parameters())} for part in (model.expert, model.frozen)]
    optimizer = torch.optim.AdamW([{"params": shared}, *of_others], lr=1e-2)
    config = {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": 200.0}
    experts = {"parameters": ["expert.*"], "parallel_size": 2}
    with zw.initialize(model, optimizer, {**config, "experts": experts}) as engine:
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            optimizer.param_groups[1]["lr"] = 1e-2 / (1 + number)
            optimizer.param_groups[2]["lr"] = 1e-2 * dist.get_rank()
            engine.step()
        return engine.global_steps


@daily(("stage", "world"), [(2, 2)], [(1, 4), (3, 4)])
def test_what_ranks_do_not_share_has_options_of_its_own(pools: Pools, stage: int, world: int) -> None:
    assert pools(world).run(apart, stage) == [3] * world
