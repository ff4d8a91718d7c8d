"""Training loops with graphs of calls on the CPU, and without: what comes of them has to be the same."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.graph_double import GraphDouble

WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.line, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(torch.tanh(self.line(self.norm(x))))
        if self.reads:  # in a call, behind which the next block is gathered
            out = out * (1.0 if out.sum().item() < math.inf else 2.0)
        return out


class Net(nn.Module):
    """Gives a loss, times `factor` (0-dim), which a test makes infinite, and something beside it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.noise: Callable[[], float] = lambda: 0.0

    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        loss = self.head(self.norm(x)).square().mean() * factor * (1.0 + self.noise())
        return {"loss": loss, "spread": x.std(), "name": "net"}


@dataclass(frozen=True)
class Case:
    stage: int = 3
    gas: int = 1
    loop: str = "train_step"
    """or "plain"; "clipped", by hand; "coalesced" or "no_sync", whose backwards defer; "busy": with other things in
    between"""
    dropout: float = 0.0
    clipping: float | None = None
    overflow: int | None = None
    """the step in which gradients are infinite; with a dynamic loss scale"""
    decay: bool = False
    """a learning rate that falls"""
    cycle: bool = False
    """the engine's scheduler changes the weight decay, too"""
    sizes: tuple[int, ...] = (4,)
    """of the batches, in turn"""
    steps: int = 30
    frozen: bool = False
    """are the blocks' layers?"""
    reads: bool = False
    """does the first block read a number on the host, so that it does not compile?"""
    config: dict[str, Any] = field(default_factory=dict)


class Cycle(torch.optim.lr_scheduler.LambdaLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.5 if self.last_epoch >= 8 else 0.01


def start(case: Case, graphs: bool) -> Any:
    torch.manual_seed(0)
    model = Net(case.dropout)
    model.blocks.get_submodule("0").reads = case.reads  # type: ignore[assignment]
    if case.frozen:
        for block in model.blocks:
            block.get_submodule("line").requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n) if case.decay else None
    if case.cycle:
        decay = Cycle(optimizer, lambda n: 1.0)
    config: dict[str, Any] = {
        "stage": case.stage,
        "gradient_accumulation_steps": case.gas,
        "compile": {"lower": "aot_eager", "cuda_graphs": graphs, **case.config.get("compile", {})},
        **{key: value for key, value in case.config.items() if key != "compile"},
    }
    if case.clipping is not None:
        config["gradient_clipping"] = case.clipping
    if case.overflow is not None:
        config["precision"] = {"loss_scale": "dynamic", "initial_loss_scale": 256.0, "loss_scale_window": 5}
    return zw.initialize(model, optimizer, config, lr_scheduler=decay)


@contextmanager
def started(case: Case, graphs: bool) -> Iterator[tuple[Any, GraphDouble]]:
    """An engine whose device has graphs; it ends with the block, unless that raises."""
    double = GraphDouble(1 << 24)
    with patch("zeroweave.engine.assembly.capture_for", lambda device: double):
        engine = start(case, graphs)
    yield engine, double
    engine.destroy()


def batch_of(case: Case, step: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    size = case.sizes[step % len(case.sizes)]
    infinite = step == case.overflow and micro == case.gas // 2
    return torch.randn(size, WIDTH, generator=generator), torch.tensor(math.inf if infinite else 1.0)


def loss_fn(output: Any, batch: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def micro_step(engine: Any, case: Case, batch: tuple[Tensor, Tensor]) -> Tensor:
    if case.loop == "train_step":
        loss: Tensor = engine.train_step(batch, loss_fn)
        return loss
    loss = engine(*batch)["loss"] * 1.5
    engine.backward(loss)
    if case.loop == "clipped" and engine.is_gradient_accumulation_boundary():
        engine.clip_grad_norm_(0.1)
        if engine.global_steps in (14, 18):  # somebody looks at what was clipped
            engine.local("head.weight", "grad")
    engine.step()
    return loss.detach()


def window(engine: Any, case: Case, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A window whose backwards defer: in a coalesced block, or all but the last one, with a step after each second."""
    losses = []
    if case.loop == "coalesced":
        with engine.coalesce_grad_reduction():
            for batch in batches:
                losses.append(engine(*batch)["loss"])
                engine.backward(losses[-1] / len(batches))
    else:
        with engine.no_sync():
            for index, batch in enumerate(batches[:-1]):
                losses.append(engine(*batch)["loss"])
                engine.backward(losses[-1])
                if index % 2:
                    engine.step()
        losses.append(engine(*batches[-1])["loss"])
        engine.backward(losses[-1])
        engine.set_gradient_accumulation_boundary(True)
    engine.step()
    engine.set_gradient_accumulation_boundary(None)
    return [loss.detach() for loss in losses]


def busy(engine: Any, case: Case, step: int, micro: int, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A micro-step with something else in it, another thing in each of some steps."""
    if step % 4 == 1:  # which disturbs nothing
        with torch.no_grad():
            engine.eval()
            engine(*batch)
            engine.train()
    x, factor = batch
    adds_up = case.stage == 1 and case.gas > 1  # there a sum over a backward comes first without graphs
    match step if micro == case.gas // 2 else -1:
        case 12:  # gradients are read
            engine.backward(engine(*batch)["loss"])
            assert engine.local("head.weight", "grad") is not None or case.gas > 1
            engine.step()
        case 14:  # one forward more, without a backward
            engine(*batch)
            return micro_step(engine, case, batch)
        case 16 if not adds_up:  # two forwards, one backward
            loss = engine(*batch)["loss"] + 0.5 * engine(x * 2, factor)["loss"]
            engine.backward(loss)
            engine.step()
            return loss.detach()
        case 18:  # the same backward twice
            loss = engine(*batch)["loss"]
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            return loss.detach()
        case 20:  # a window is given up
            engine.backward(engine(*batch)["loss"])
            engine.zero_grad()
            for each in range(micro + 1):
                micro_step(engine, case, batch_of(case, step, each))
        case 22:  # one backward more in the window
            engine.set_gradient_accumulation_boundary(False)
            micro_step(engine, case, batch)
            engine.set_gradient_accumulation_boundary(None)
            return micro_step(engine, case, batch) if case.gas == 1 else factor * 0
        case 24:
            with engine.no_sync():
                engine.backward(engine(*batch)["loss"])
            engine.step()
        case 26:
            engine.backward(engine(*batch)["loss"])
            assert torch.is_tensor(engine.full("head.weight"))
            engine.clip_grad_norm_(0.05) if case.gas == 1 else None
            engine.step()
        case 42 if not adds_up:  # part of the model by itself, in the loss
            engine.backward(engine(*batch)["loss"] + engine.module.head(x).square().mean())
            engine.step()
        case 44:  # and in a backward of its own
            engine.backward(engine(*batch)["loss"])
            engine.backward(engine.module.head(x).square().mean())
            engine.step()
        case 46 if not adds_up:  # the modes change between two forwards
            one = engine(*batch)["loss"]
            engine.eval()
            other = engine(*batch)["loss"]
            engine.train()
            engine.backward(one + other)
            engine.step()
        case 48:  # an option between backward and step
            engine.backward(engine(*batch)["loss"])
            engine.optimizer.param_groups[0]["weight_decay"] += 0.01
            engine.step()
        case 50:  # a forward, and its window is given up
            engine(*batch)
            engine.zero_grad()
            for each in range(micro + 1):
                micro_step(engine, case, batch_of(case, step, each))
        case 52:  # a block begins between a forward and its backward
            loss = engine(*batch)["loss"]
            with engine.no_sync():
                engine.backward(loss)
            engine.step()
        case 54:  # and ends there
            with engine.no_sync():
                loss = engine(*batch)["loss"]
            engine.backward(loss)
            engine.step()
        case 56 if case.gas == 1:
            loss = engine(*batch)["loss"]
            with engine.coalesce_grad_reduction():
                engine.backward(loss)
                loss = engine(*batch)["loss"]
            engine.backward(loss)
            engine.step()
        case 58:  # the window ends elsewhere than its forward was told
            loss = engine(*batch)["loss"]
            engine.set_gradient_accumulation_boundary(not engine.is_gradient_accumulation_boundary())
            engine.backward(loss)
            engine.set_gradient_accumulation_boundary(None)
            engine.step()
        case _:
            return micro_step(engine, case, batch)
    return factor * 0


def between(engine: Any, step: int) -> None:
    """What is done between two windows."""
    if step == 28:
        engine.reschedule(prefetch=0)
    if step == 34:
        with engine.full_parameters() as parameters, torch.no_grad():
            parameters["head.bias"].add_(0.01)
    if step == 35:
        engine.set_full("blocks.1.line.weight", torch.full((WIDTH, WIDTH), 0.05))
    if step == 36:
        engine.optimizer.param_groups[0]["weight_decay"] = 0.02
    if step == 40:
        engine.set_full("head.weight", torch.full((1, WIDTH), 0.1))


def loop(engine: Any, case: Case) -> Iterator[Any]:
    """The case's loop: losses, and of each step whether it was applied and the norm."""
    for step in range(case.steps):
        if case.loop in ("coalesced", "no_sync"):
            yield from window(engine, case, [batch_of(case, step, micro) for micro in range(case.gas)])
        else:
            for micro in range(case.gas):
                batch = batch_of(case, step, micro)
                yield busy(engine, case, step, micro, batch) if case.loop == "busy" else micro_step(engine, case, batch)
                yield engine.was_step_applied()
        yield engine.get_global_grad_norm()
        if case.loop == "busy":
            between(engine, step)


def left_by(engine: Any) -> dict[str, Any]:
    """What a program has left: values, counters, random numbers."""
    return {
        "values": {name: value.tolist() for name, value in engine.state_dict().items()},
        "steps": (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.loss_scale),
        "rate": float(engine.optimizer.param_groups[0]["lr"]),
        "random": torch.rand(3).tolist(),
    }


@dataclass
class Told:
    """What graphs did: calls that were launched, captures, and why calls were not launched."""

    launched: int
    captures: int
    why: dict[str, int]


Program = Callable[[Any], Iterator[Any]]
"""Trains an engine, and yields what it sees."""


def run(program: Program, case: Case, graphs: bool) -> tuple[dict[str, Any], Told]:
    """What the program yields, and all that it leaves; and what graphs did."""
    with warnings.catch_warnings(), started(case, graphs) as (engine, double):
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        seen = [each.item() if isinstance(each, Tensor) else each for each in program(engine)]
        told = Told(engine.stats.graphed_calls, double.captures, engine.stats.ungraphed_calls)
        return {"seen": seen, **left_by(engine)}, told


def compared(program: Program, case: Case) -> tuple[list[str], Told]:
    """What differs between the program with graphs and without, and what graphs did."""
    (graphed, told), (plain, none) = run(program, case, graphs=True), run(program, case, graphs=False)
    assert none.launched == 0
    return [what for what in plain if repr(graphed[what]) != repr(plain[what])], told
