"""What the ranks do in the GPU tests that train with graphs of calls and without."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.gpu.jobs import join

VOCABULARY, WIDTH = 512, 256


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Net(nn.Module):
    """Gives the loss of next tokens, times `factor` (0-dim), which a test makes infinite."""

    seen: Tensor

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, factor: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)) * factor


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int
    gas: int = 1
    mode: str = "aot_eager"
    dtype: str = "bfloat16"
    clipping: float | None = None
    dropout: float = 0.0
    schedule: bool = False
    overflow: int | None = None
    """the step in which the loss is infinite"""
    lengths: tuple[int, ...] = (64,)
    """of the batches, in turn"""
    delays: bool = False
    """ranks wait for up to 20 ms before each micro-step"""
    steps: int = 50
    optimizer: str = "adamw"
    loop: str = "train_step"
    """or "plain", or "clipped", by hand; "coalesced" or "no_sync", whose backwards defer; "busy": with other things in
    between; "cast", "cast around": under autocast"""
    more: dict[str, Any] = field(default_factory=dict)
    """config"""


@dataclass(frozen=True)
class Run:
    """What came of it. `values`: the parameters at the end."""

    losses: list[float]
    values: dict[str, Tensor]
    norms: list[float | None]
    skipped: int
    scale: float
    seen: float
    graphed: int
    ungraphed: dict[str, int]
    collectives: list[tuple[int, int]]
    """of each step, all-gathers and reduce-scatters"""
    told: list[str]
    reserved: list[int]
    departures: int
    held: int
    """bytes, by the graphs"""


def config(case: Case, graphs: bool) -> dict[str, Any]:
    lowering: dict[str, Any] = {"enabled": False} if case.mode == "eager" else {"lower": case.mode}
    made: dict[str, Any] = {
        "stage": case.stage,
        "gradient_accumulation_steps": case.gas,
        "precision": {"params": case.dtype},
        "compile": {**lowering, "cuda_graphs": graphs},
        "deadline_seconds": 120.0,
    }
    if case.clipping is not None:
        made["gradient_clipping"] = case.clipping
    if case.dtype == "float16":
        made["precision"] |= {"loss_scale": "dynamic", "initial_loss_scale": 1024.0, "loss_scale_window": 8}
    for key, value in case.more.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    return made


def optimizer_of(case: Case, parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """`capturable`: with the learning rate as a tensor."""
    rate = torch.tensor(1e-3, device=device) if case.optimizer == "capturable" else 1e-3
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)
    if case.optimizer == "lion":
        return zw.Lion(parameters, lr=rate, weight_decay=0.01)
    if case.optimizer == "plain":
        return torch.optim.AdamW(parameters, lr=1e-3)
    if case.optimizer == "capturable":
        return torch.optim.AdamW(parameters, lr=rate, capturable=True)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, fused=True)


def batch_of(case: Case, index: int, factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
    length = case.lengths[index % len(case.lengths)]
    tokens = torch.randint(0, VOCABULARY, (4, length), generator=generator)
    return tokens.to(device), torch.tensor(factor, device=device)


@contextmanager
def started(case: Case, graphs: bool) -> Iterator[Any]:
    device = join()
    torch.manual_seed(0)
    model = Net(case.dropout)
    optimizer = optimizer_of(case, model.to(device).parameters(), device)
    schedule = None
    if case.schedule:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(n / 10))
    torch.use_deterministic_algorithms(True, warn_only=True)
    engine = zw.initialize(model, optimizer, config(case, graphs), lr_scheduler=schedule)
    try:
        yield engine
    finally:
        torch.use_deterministic_algorithms(False)
    engine.destroy()


def micro_step(engine: Any, case: Case, batch: tuple[Tensor, Tensor]) -> Tensor:
    if case.loop == "train_step":
        loss: Tensor = engine.train_step(batch)
        return loss
    if case.loop == "cast":  # around the forward only, and the step in other modes
        with torch.autocast("cuda", torch.bfloat16):
            loss = engine(*batch)
        engine.backward(loss)
        engine.eval()
        with torch.no_grad():
            engine.step()
        engine.train()
        return loss.detach()
    if case.loop == "cast around":
        with torch.autocast("cuda", torch.bfloat16):
            return engine.train_step(batch)
    defers = case.loop == "no_sync" and not engine.is_gradient_accumulation_boundary()
    with engine.no_sync() if defers else nullcontext():
        loss = engine(*batch)
        engine.backward(loss * 1.5)
    if case.loop == "coalesced":
        return loss.detach()
    if case.loop == "clipped" and engine.is_gradient_accumulation_boundary():
        engine.clip_grad_norm_(0.5)
    engine.step()
    return loss.detach()


def busy_step(engine: Any, case: Case, step: int, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A micro-step with something else in it, another thing in each of some steps."""
    loss: Tensor
    if step % 4 == 1:  # which disturbs nothing
        with torch.no_grad():
            engine.eval()
            engine(*batch)
            engine.train()
    match step:
        case 20:  # gradients are read
            engine.backward(engine(*batch))
            assert engine.full("embed.weight", "grad") is not None
            engine.step()
        case 22:  # one forward more, without a backward
            engine(*batch)
            return micro_step(engine, case, batch)
        case 24:  # two forwards, one backward
            loss = engine(*batch) + 0.5 * engine(batch[0] + 1 - 1, batch[1] * 0.5)
            engine.backward(loss)
            engine.step()
            return loss.detach()
        case 26:  # the same backward twice
            loss = engine(*batch)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            return loss.detach()
        case 28:  # a window is given up
            engine.backward(engine(*batch))
            engine.zero_grad()
            return micro_step(engine, case, batch)
        case 30:
            engine.reschedule(prefetch=1)
            return micro_step(engine, case, batch)
        case 34:  # written in between
            with engine.full_parameters() as parameters, torch.no_grad():
                parameters["head.bias"].add_(0.01)
            return micro_step(engine, case, batch)
        case 36:  # only one rank asks
            if dist.get_rank() == 0:
                engine.local("embed.weight")
            return micro_step(engine, case, batch)
        case 38:
            engine.optimizer.param_groups[0]["weight_decay"] = 0.02
            return micro_step(engine, case, batch)
        case 40:  # part of the model by itself, in the loss
            x = torch.linspace(-1, 1, WIDTH, dtype=getattr(torch, case.dtype), device=engine.device)
            loss = engine(*batch) + engine.module.head(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            return loss.detach()
        case _:
            return micro_step(engine, case, batch)
    return batch[1] * 0


def train(case: Case, graphs: bool) -> Run:
    """Every loss is kept to the end before it is read: a replay must not overwrite the one before."""
    waits = random.Random(dist.get_rank())
    norms: list[float | None] = []
    kept: list[Tensor] = []
    collectives, reserved = [], []
    with warnings.catch_warnings(record=True) as caught, started(case, graphs) as engine:
        warnings.simplefilter("always")
        torch.manual_seed(17 + dist.get_rank())
        for step in range(case.steps):
            step_of = partial(busy_step, step=step) if case.loop == "busy" else micro_step
            with engine.coalesce_grad_reduction() if case.loop == "coalesced" else nullcontext():
                for micro in range(case.gas):
                    if case.delays:
                        time.sleep(waits.random() * 0.02)
                    factor = math.inf if step == case.overflow and micro == case.gas // 2 else 1.0
                    batch = batch_of(case, step * case.gas + micro, factor, engine.device)
                    kept.append(step_of(engine, case, batch=batch))
            if case.loop == "coalesced":
                engine.step()
            traffic = engine.stats.last_step
            counts = [traffic[kind].calls if kind in traffic else 0 for kind in ("all_gather", "reduce_scatter")]
            collectives.append((counts[0], counts[1]))
            if case.clipping is not None:
                norms.append(engine.get_global_grad_norm())
            if step % 10 == 9:
                reserved.append(torch.cuda.memory_reserved())
        stats = engine.stats
        values = engine.state_dict()
        return Run(
            [float(loss) for loss in kept],
            values,
            norms,
            engine.skipped_steps,
            engine.loss_scale,
            float(engine.module.seen),
            stats.graphed_calls,
            stats.ungraphed_calls,
            collectives,
            [str(each.message) for each in caught if "cuda_graphs" in str(each.message)],
            reserved,
            stats.departures,
            stats.memory.graphs,
        )


def equal(one: Run, other: Run) -> str:
    """What differs between two runs; "" if nothing does."""
    differs = [name for name, value in one.values.items() if not torch.equal(value, other.values[name])]
    for what in ("losses", "norms", "skipped", "scale", "seen"):
        a, b = getattr(one, what), getattr(other, what)
        if repr(a) != repr(b):  # by their text, because NaN is not NaN
            at = (
                next((i for i, pair in enumerate(zip(a, b, strict=False)) if repr(pair[0]) != repr(pair[1])), "")
                if (isinstance(a, list))
                else ""
            )
            differs.append(f"{what} {at}: {a if at == '' else a[at]} != {b if at == '' else b[at]}")
    return "; ".join(differs)


def compared(case: Case) -> tuple[str, Run]:
    """With graphs and without: what differs, and the run with graphs."""
    graphed = train(case, graphs=True)
    return equal(graphed, train(case, graphs=False)), graphed
