"""Programs for Lightning's Trainer and for Fabric, which run with any strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.marks import MODES
from zeroweave.integrations.lightning import ZeroweaveFabricStrategy, ZeroweaveStrategy

WIDTH, ROWS, STEPS = 6, 176, 20


@contextmanager
def environment() -> Iterator[None]:
    """That of a process which torchrun has started."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()}, TORCHELASTIC_RUN_ID="test")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def config(stage: int, mode: str = "eager", **more: Any) -> dict[str, Any]:
    return {"stage": stage, "compile": MODES[mode], "deadline_seconds": 120.0, **more}


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(2)])
        self.frozen, self.drop = nn.Linear(WIDTH, 1).requires_grad_(False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.enter(x)))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden) + self.frozen(x)


class Module(LightningModule):
    """`manual`: it steps by itself."""

    def __init__(self, dropout: float = 0.0, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net, self.automatic_optimization = Net(dropout), not manual
        self.losses: list[float] = []
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.net(batch).square().mean().item())

    def test_step(self, batch: Tensor, index: int) -> None:
        self.validation_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keeping(Callback):
    """Keeps what there is at the end of a fit."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.rates: list[float] = []
        self.compiled, self.scale = 0, 0.0

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        engine = strategy.engine if isinstance(strategy, ZeroweaveStrategy) else None
        state = module.state_dict() if engine is None else engine.state_dict()
        if engine is not None:
            self.compiled, self.scale = engine.stats.compiled_calls, engine.loss_scale
        self.weights = {name: value.clone() for name, value in state.items()}
        self.rates = [config.scheduler.get_last_lr()[0] for config in trainer.lr_scheduler_configs]


def trainer(strategy: Any, folder: Path, *callbacks: Callback, **more: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=world(),
        strategy=strategy,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**quiet, "enable_checkpointing": False, "max_steps": STEPS, **more},
    )


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(rows(), batch_size=2), DataLoader(rows()[:8], batch_size=2)


def fitted(
    strategy: Any,
    folder: Path,
    save: Path | None = None,
    load: Path | None = None,
    module: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Weights, losses and learning rate of a fit, which saves at the end of each epoch or begins at such an end."""
    with environment():
        keeping, made, callbacks = Keeping(), Module(**(module or {})), []
        if save is not None:
            more["enable_checkpointing"] = True
            callbacks.append(ModelCheckpoint(save, "{epoch}", save_top_k=-1, every_n_epochs=1, save_last=True))
        trainer(strategy, folder, keeping, *callbacks, **more).fit(made, *loaders(), ckpt_path=load and str(load))
        return {
            "weights": keeping.weights,
            "losses": made.losses,
            "lr": keeping.rates,
            "seen": made.seen,
            "compiled": keeping.compiled,
            "scale": keeping.scale,
        }


# ---------------------------------------------------------------------- Fabric
def looped(
    strategy: Any,
    save: Path | None = None,
    load: Path | None = None,
    at: int = 8,
    dropout: float = 0.0,
    accumulate: int = 2,
    **more: Any,
) -> dict[str, Any]:
    """Weights, losses and norms of a loop over Fabric, which saves behind `at` steps or begins there."""
    with environment():
        fabric = Fabric(accelerator="cpu", devices=world(), strategy=strategy, **more)
        fabric.launch()
        torch.manual_seed(7)
        net = Net(dropout)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.7)
        model, optimizer = fabric.setup(net, optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "steps": 0}
        if load is not None:
            assert fabric.load(load, state) == {"more": "of it"}
        seeds = torch.Generator()  # else a loader that begins once more draws its seed from the run's random numbers
        loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=2, generator=seeds))
        losses, norms = [], []
        for index, batch in enumerate(loader):
            if index < state["steps"] * accumulate:
                continue
            ends = (index + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not ends):
                loss = model(batch).square().mean()
                fabric.backward(loss / accumulate)
            losses.append(loss.item())
            if not ends:
                continue
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.3)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            state["steps"] += 1
            if save is not None and state["steps"] == at:
                fabric.save(save, {**state, "more": "of it"})
            if state["steps"] == STEPS:
                break
        weights = fabric.strategy.get_module_state_dict(model._forward_module)
        sharded = isinstance(fabric.strategy, ZeroweaveFabricStrategy)
        return {
            "weights": {name: value.clone() for name, value in weights.items()},
            "losses": losses,
            "norms": norms,
            "compiled": fabric.strategy.engine.stats.compiled_calls if sharded else 0,
            "scale": fabric.strategy.engine.loss_scale if sharded else 0.0,
        }


def strategies(kind: str, stage: int, mode: str = "eager", **more: Any) -> Any:
    made = ZeroweaveFabricStrategy if kind == "fabric" else ZeroweaveStrategy
    return made(config(stage, mode, **more))


def plain(kind: str) -> Any:
    return FabricDDP() if kind == "fabric" else "ddp"
