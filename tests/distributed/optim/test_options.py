"""Ranks that would update by different options are told, and nothing is written. Equal ones may come in many ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zeroweave as zw
from tests.distributed.optim.low_precision import MLP, adamw, loss_of, settings
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.reference import build
from tests.support.replays import Case, batch_of, loss_fn, started

STAGES = [1, 2, 3]


def by_its_own_loss(engine: zw.Engine) -> None:
    """As ReduceLROnPlateau does that looks at a rank's own loss."""
    if dist.get_rank() == 1:
        engine.optimizer.param_groups[0]["lr"] *= 0.5


def other_decay(engine: zw.Engine) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1 * dist.get_rank()


def other_norm(engine: zw.Engine) -> None:
    engine.clip_grad_norm_(1.0 + dist.get_rank())


def train(stage: int, mode: str, change: Callable[[zw.Engine], None]) -> tuple[str, bool]:
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
    ("stage", "mode", "change", "words"),
    [
        (2, "eager", by_its_own_loss, "'lr' of param_groups[0] is 0.001 on rank 0, 0.0005 on rank 1"),
        (3, "aot_eager", other_norm, "'max_norm' of clip_grad_norm_ is [1.0] on rank 0, [2.0] on rank 1"),
    ],
    [
        (stage, mode, change, words)
        for stage in STAGES
        for mode in MODES
        for change, words in (
            (by_its_own_loss, "'lr' of param_groups[0] is 0.001 on rank 0, 0.0005 on rank 1"),
            (other_decay, "'weight_decay' of param_groups[0] is 0.0 on rank 0, 0.1 on rank 1"),
            (other_norm, "'max_norm' of clip_grad_norm_ is [1.0] on rank 0, [2.0] on rank 1"),
        )
    ],
)
def test_ranks_that_differ_are_told(pools: Pools, stage: int, mode: str, change: Any, words: str) -> None:
    for message, same in pools(2).run(train, stage, mode, change):
        assert message.startswith("step 2: the ranks would update by different options"), message
        assert words in message and same, message


def alike(stage: int, mode: str) -> list[float]:
    """Ranks have equal options at each step, and come to them at other times, by other classes, or with a detour."""
    rank, losses = dist.get_rank(), []
    module = build(MLP)
    optimizer = adamw(list(module.parameters()))
    with zw.initialize(module, optimizer, settings(stage, mode, gradient_accumulation_steps=2)) as engine:
        (group,) = optimizer.param_groups
        for index in range(12):
            rate = 0.02 / (1 + index)
            if rank == 0:
                group["lr"], group["betas"], group["weight_decay"] = rate, (0.9, 0.95), 0.0
            for micro in range(2):
                loss = loss_of(engine, 2 * index + micro, torch.float32)
                losses.append(loss.item())
                if rank == 1:  # in the middle of the window, late, and only for a while
                    time.sleep(0.02)
                    group["lr"] = 10.0
                engine.backward(loss)
                if rank == 1:
                    group["lr"], group["betas"], group["weight_decay"] = np.float64(rate), [0.9, 0.95], 0
                    group["mine"] = index
                engine.step()
    return losses


@daily(("stage", "mode"), [(2, "eager")], [(stage, mode) for stage in STAGES for mode in MODES])
def test_equal_options_may_come_in_many_ways(pools: Pools, stage: int, mode: str) -> None:
    assert all(len(losses) == 24 for losses in pools(2).run(alike, stage, mode))


def replay(loop: str) -> tuple[int, str]:
    """How many calls were replayed, and what the step raises behind which a rank has another rate or norm."""
    with started(Case(stage=2, loop=loop), graphs=True) as engine:
        engine.optimizer.param_groups[0]["lr"] = 1e-2
        raised = ""
        for step in range(16):
            batch, other = batch_of(Case(), step, 0, dist.get_rank()), 1.0
            if step >= 10:
                other = 1.0 + 1.0 * (step % 2)  # graphs of both are there, when the ranks come apart
            if step == 15:
                if loop == "train_step":
                    engine.optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
                other += dist.get_rank()
            try:
                if loop == "train_step":
                    engine.train_step(batch, loss_fn)
                    continue
                engine.backward(engine(*batch)["loss"] * 1.5)
                engine.clip_grad_norm_(other)
                engine.step()
            except zw.AgreementError as error:
                raised = str(error)
        return engine.stats.replayed_steps, raised


@pytest.mark.parametrize("loop", ["train_step", "clipped"])
def test_replays_compare_them(pools: Pools, loop: str) -> None:
    for replayed, raised in pools(2).run(replay, loop):
        assert replayed >= 4 and "the ranks would update by different options" in raised, (replayed, raised)
