"""An ordinary script for Accelerate, as runs of both accelerators: that of the library, and zeroweave's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.marks import MODES
from zeroweave.integrations.accelerate import ZeroweaveAccelerator

WIDTH, ROWS = 6, 44
"""With batches of 2 on 2 ranks an epoch has 11 of them, so that an accumulation of 2 or 3 ends early in its last."""


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(2)])
        self.frozen = nn.Linear(WIDTH, 1).requires_grad_(False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.enter(x)))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden) + self.frozen(x)


_MADE: list[ZeroweaveAccelerator] = []
"""in the present environment, which ends their engines in the end"""


@contextmanager
def environment() -> Iterator[None]:
    """Accelerate as in a process that a launcher has started, and nothing left of it afterwards."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost",
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()} if world > 1 else {})
    try:
        yield
        for model in (model for accelerator in _MADE for model in accelerator._models):
            model.engine.destroy()
    finally:
        _MADE.clear()
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def zeroweave(stage: int, mode: str = "eager", **config: Any) -> Callable[..., Accelerator]:
    """Makes zeroweave's accelerator."""
    settings = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 120.0, **config}

    def make(**more: Any) -> Accelerator:
        _MADE.append(ZeroweaveAccelerator(cpu=True, zeroweave_config=settings, **more))
        return _MADE[-1]

    return make


def library(**more: Any) -> Accelerator:
    """Makes the library's own, which replicates with DistributedDataParallel."""
    return Accelerator(cpu=True, **more)


class Run:
    """A script: everything from the accelerator on, and the loop."""

    def __init__(
        self,
        make: Callable[..., Accelerator],
        accumulate: int = 1,
        dropout: float = 0.0,
        plugin: Mapping[str, bool] | None = None,
        **more: Any,
    ) -> None:
        accumulation = GradientAccumulationPlugin(num_steps=accumulate, **(plugin or {}))
        self.accelerator = make(gradient_accumulation_plugin=accumulation, **more)
        torch.manual_seed(7)
        model = Model(dropout)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.7)
        data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.loader, self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            loader, model, optimizer, schedule
        )
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.steps = 0

    def train(self, steps: int, skip: int = 0, between: Mapping[int, Callable[[], object]] | None = None) -> None:
        """Micro-steps, from the batch behind `skip` of the first epoch on; `between`: behind which to call what."""
        accelerator, loader, left = self.accelerator, self.accelerator.skip_first_batches(self.loader, skip), steps
        while True:
            for batch in loader:
                with accelerator.accumulate(self.model):
                    loss = self.model(batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.3)))
                        self.steps += 1
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                left -= 1
                (between or {}).get(steps - left, lambda: None)()
                if not left:
                    return
            loader = self.loader

    def weights(self) -> dict[str, Tensor]:
        """On rank 0; `{}` on the others where the model is sharded."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def facts(run: Run) -> dict[str, Any]:
    return {
        "weights": run.weights(),
        "norms": run.norms,
        "losses": run.losses,
        "steps": run.steps,
        "lr": run.schedule.get_last_lr(),
    }


def trained(make: Callable[..., Accelerator], steps: int, **more: Any) -> dict[str, Any]:
    with environment():
        run = Run(make, **more)
        run.train(steps)
        return facts(run)


def resumed(make: Callable[..., Accelerator], folder: Path, at: int, steps: int, **more: Any) -> dict[str, Any]:
    with environment():
        run = Run(make, **more)
        run.accelerator.load_state(folder)
        run.train(steps, skip=at)
        return facts(run)
