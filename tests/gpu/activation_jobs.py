"""What the ranks do in the GPU tests of activations in host memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zeroweave as zw
from tests.gpu.jobs import WIDE, adamw, allocated, config, deterministic, join, start, tokens
from tests.gpu.schedule_jobs import Net, rows, step
from zeroweave.runtime.writes import WATCHED
from zeroweave.schedule import Offload, Reload

SEQUENCES, LENGTH = 8, 512
WARM = 3
"""Steps until everything has been compiled and memory is what it will be."""


@dataclass(frozen=True)
class Course:
    """One engine on one rank. Bytes: `forward`, what a forward adds at most; `residents`, what each leaves behind."""

    losses: list[float]
    gradients: dict[str, Tensor]
    forward: int
    residents: list[int]
    moved: int
    host: int
    on_demand: int
    followed: bool
    copies: int
    """of a recorded step"""
    gib_per_second: float
    """of a copy as large as an activation of the model"""

    @property
    def resident(self) -> int:
        """What a forward leaves behind at most."""
        return max(self.residents)


def train(stage: int, mode: str, wanted: bool, accumulate: int, steps: int = 6) -> Course:
    device = join()
    settings: dict[str, Any] = config(stage, mode, torch.bfloat16)
    settings |= {"offload": {"activations": wanted}, "gradient_accumulation_steps": accumulate}
    settings["compile"]["cuda_graphs"] = False  # PyTorch counts no tensor in a graph's memory
    losses, forward = [], 0
    residents: list[int] = []
    gradients: dict[str, Tensor] = {}
    with deterministic(), start(WIDE, settings, torch.bfloat16) as engine:
        for index in range(steps * accumulate):
            batch = tokens(WIDE, device, index, SEQUENCES, LENGTH)
            warm = index >= WARM * accumulate
            before = allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = engine(batch, batch)
            if warm:
                torch.cuda.synchronize()
                forward = max(forward, torch.cuda.max_memory_allocated() - before)
                residents.append(torch.cuda.memory_allocated() - before)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                gradients = {name: g for name, g in engine.gradients().items() if g is not None}
            engine.step()
            losses.append(loss.item())
            del loss
        stats, followed = engine.stats, engine.executed == engine.schedule.instructions
        with engine.record() as record:
            for index in range(2 * accumulate):
                batch = tokens(WIDE, device, index, SEQUENCES, LENGTH)
                engine.backward(engine(batch, batch))
                engine.step()
        copies = record.operations.steps[-1].copies
        moves = sum(isinstance(each, Offload | Reload) for each in engine.schedule.instructions)
        assert len(copies) <= moves
        nbytes = SEQUENCES * LENGTH * WIDE.hidden * 2
        seconds = record.operations.costs.copy(nbytes)
        return Course(
            losses=losses,
            gradients=gradients,
            forward=forward,
            residents=residents,
            moved=stats.offloaded_activations // accumulate,
            host=stats.offloaded_peak,
            on_demand=stats.on_demand_reloads,
            followed=followed,
            copies=len(copies),
            gib_per_second=nbytes / seconds / 2**30 if seconds else 0.0,
        )


@dataclass(frozen=True)
class Compared:
    """One rank's course with activations that stay and with some that move."""

    stay: Course
    move: Course
    equal: bool


def compare(stage: int, mode: str, accumulate: int) -> Compared:
    stay, move = (train(stage, mode, wanted, accumulate) for wanted in (False, True))
    equal = stay.losses == move.losses and stay.gradients.keys() == move.gradients.keys()
    equal = equal and all(torch.equal(stay.gradients[name], move.gradients[name]) for name in stay.gradients)
    for course in (stay, move):
        course.gradients.clear()  # they need not travel
    return Compared(stay, move, equal)


def loss_of(engine: Any, x: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = (engine(x) - target.mean()).pow(2).mean()
    return loss


def waits(mode: str) -> tuple[Counter[str], Counter[str]]:
    """How often the host waited for the device in a step, by phase, with activations that stay and that move."""
    device = join()
    found = []
    for wanted in (False, True):
        offload = {"activations": wanted, "activations_threshold_bytes": 1 << 16}
        with started(device, mode, offload) as engine:
            for index in range(max(WARM, WATCHED + 1)):
                step(engine, index)
            counted: Counter[str] = Counter()
            for index in range(3):
                x = rows(engine.rank, index, device)
                with torch.no_grad():
                    target = x.sign()
                loss = during("forward", counted, partial(loss_of, engine, x, target))
                during("backward", counted, partial(engine.backward, loss))
                during("step", counted, engine.step)
            assert (engine.stats.offloaded_activations > 0) == wanted
        found.append(counted)
    return found[0], found[1]


def during(phase: str, counted: Counter[str], action: Callable[[], Any]) -> Any:
    """What `action` returns; PyTorch's warnings about synchronisation are counted."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counted[phase] += sum("synchroniz" in str(each.message) for each in told)
    return result


def started(device: torch.device, mode: str, offload: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Net().to(device)
    lowering: dict[str, Any] = {"enabled": False} if mode == "eager" else {"lower": mode}
    settings = {"stage": 3, "compile": lowering, "offload": offload, "deadline_seconds": 60.0}
    return zw.initialize(model, adamw(model.parameters()), settings)
