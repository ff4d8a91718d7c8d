"""A small training run that saves now and then, and all that it comes to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader

import zeroweave as zw
from tests.support.harness import Outcome
from tests.support.marks import MODES

STEPS, EVERY = 9, 2
"""How long it is, and after how many steps each it saves."""


def stop(folder: Path, seconds: float | None = None) -> None:
    """Stops this process as by SIGSTOP, for good or for so long; `folder` is told when, and that it goes on."""
    (folder / "stopped").write_text(str(time.time()))
    if seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; touch {folder}/continued; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def stacks_of(outcome: Outcome) -> Path:
    """Where a rank says that the stacks are."""
    found = re.search(r"the ranks' stacks: (\S+)", outcome.message + outcome.stderr)
    assert found, outcome.describe()
    return Path(found[1])


def train(
    folder: Path | None,
    stage: int,
    mode: str,
    fault: str = "",
    step_begins: Callable[[zw.Engine], None] = lambda engine: None,
    deadline: float = 200.0,
    steps: float = STEPS,
    **checkpoint: Any,
) -> dict[str, Any]:
    """Goes on from the latest checkpoint in `folder`, if there is one. `fault`: as `ZEROWEAVE_FAULT`.

    Saves are asynchronous where a fault needs that.
    """
    os.environ["ZEROWEAVE_FAULT"] = fault
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 19), nn.BatchNorm1d(19), nn.Dropout(0.2), nn.Linear(19, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "stage": stage,
        "compile": MODES[mode],
        "precision": {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "loss_scale_window": 4},
        "checkpoint": checkpoint,
        "deadline_seconds": deadline,
    }
    engine = zw.initialize(model, optimizer, config, lr_scheduler=lambda each: MultiStepLR(each, [3, 6]))
    torch.manual_seed(1 + engine.rank)
    dataset = torch.randn(44, 8, generator=torch.Generator().manual_seed(2))
    sampler = zw.data.GlobalBatchSampler(dataset, batch_size=4, seed=3)
    loader, losses = DataLoader(dataset, batch_sampler=sampler), {}
    engine.on_signal(data=sampler)
    if folder is not None:
        engine.load(folder, data=sampler, missing_ok=True)
    while engine.global_steps < steps:
        for batch in sampler.counted(loader):
            step_begins(engine)
            loss = engine.train_step(batch, lambda output, _: output.square().mean())
            losses[engine.global_steps] = loss.item(), batch.sum().item()
            if folder is not None and engine.global_steps % EVERY == 0:
                engine.save(folder, data=sampler, asynchronous="phase=stage" in fault)
            if engine.global_steps == steps:
                break
    return {"losses": losses} | state_of(engine, sampler)


def state_of(engine: zw.Engine, sampler: zw.data.GlobalBatchSampler) -> dict[str, Any]:
    """What a run has at its end on this rank, and that destroys the engine."""
    names = [slot.name for bucket in engine.buckets for slot in bucket.slots]
    kinds = ("param", "exp_avg", "exp_avg_sq", "step")
    found: dict[str, Any] = {f"{what} {name}": engine.local(name, what).tolist() for name in names for what in kinds}  # type: ignore[union-attr]
    found |= {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
    found["random"] = torch.get_rng_state().tolist()
    found["lr"] = engine.lr_scheduler.state_dict(), [group["lr"] for group in engine.optimizer.param_groups]  # type: ignore[union-attr]
    found["scale"], found["steps"] = engine.loss_scale, (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    found["data"] = sampler.epoch, sampler.position
    engine.destroy()
    dist.barrier()
    return found
