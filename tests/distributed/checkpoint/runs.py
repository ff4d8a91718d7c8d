"""Runs that are saved and go on: what they train, and all that two of them must have in common."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES

WIDTH, ROWS = 6, 12
"""Rows of all ranks together, which any number of ranks up to four divides."""

Facts = dict[str, Any]


class Odd(nn.Module):
    """Tied, frozen and odd parameters, ones of 0 and 1 elements, and some without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.frozen = nn.Linear(WIDTH, 5).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, 37)
        self.tied.weight = self.first.weight
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.none, self.flat = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))
        self.unused = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(x) + self.tied(x)) * self.scale
        return self.second(hidden) * self.one + self.frozen(x).sum(-1, keepdim=True)


class Noisy(nn.Module):
    """Dropout, which draws random numbers, and batch norm, whose buffers differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(33), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.drop(F.relu(self.norm(self.enter(x)))))


class Plain(nn.Module):
    def __init__(self, width: int = 29) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Left(nn.Module):
    """Of its first parameter one element is left for the second of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = (nn.Parameter(torch.randn(numel)) for numel in (97, 13))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.many.square().mean() + self.few.sum()


class Counting(torch.optim.SGD):
    """Keeps only what belongs to a parameter as a whole: a Python number, and a tensor of one element."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("largest", torch.zeros(1))
                    state["steps"] = state.get("steps", 0) + 1
                    state["largest"] = state["largest"] + 0.5
                    with torch.no_grad():
                        parameter.add_(parameter.grad, alpha=-group["lr"] / float(state["steps"]))


def muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The matrices by an optimizer that wants them whole, the rest by another."""
    matrices, rest = ([p for p in parameters if (p.ndim == 2) == whole] for whole in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "groups": lambda parameters: torch.optim.Adam(
        [{"params": parameters[::2], "lr": 2e-2}, {"params": parameters[1::2], "betas": (0.8, 0.9)}], lr=1e-2
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "counting": lambda parameters: zw.element_wise(Counting(parameters, lr=0.1)),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=1),
    "tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "muon": muon,
    "counted wholes": lambda parameters: zw.WholeMatrices(torch.optim.AdamW(parameters, lr=1e-2)),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "noisy": Noisy, "plain": Plain, "left": Left}


def make(model: str, optimizer: str | None, stage: int, mode: str, seed: int, **more: Any) -> zw.Engine:
    """An engine of a model of this seed, with a schedule of learning rates where that can be."""
    torch.manual_seed(seed)
    module = MODELS[model]()
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0, **more}
    if optimizer is None:
        return zw.initialize(module, None, config)
    schedule = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 3, 3, 5], gamma=0.5)
    return zw.initialize(module, OPTIMIZERS[optimizer](list(module.parameters())), config, lr_scheduler=schedule)


def batch(engine: zw.Engine, index: int) -> Tensor:
    """This rank's share of the rows of a micro-step."""
    everything = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
    return everything.chunk(engine.world)[engine.rank]


def train(engine: zw.Engine, steps: int) -> list[float]:
    """Goes on from where the engine is; this rank's losses."""
    losses = []
    for _ in range(steps * engine.config.gradient_accumulation_steps):
        loss = engine(batch(engine, engine.micro_steps)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(engine: zw.Engine) -> dict[str, Tensor]:
    """The masters of all parameters, and all that the optimizer keeps of each, on the CPU. Collective."""
    found = {}
    names = [name for name, _ in engine.module.named_parameters()]
    for name in names:
        full = engine.full(name)
        assert full is not None
        found[name] = full.cpu()
    if engine.optimizer is not None:
        keys = sorted({key for name in names[:2] for key in _kept(engine, name)})
        states = {f"{name} {key}": _state(engine, name, key) for name in names for key in keys}
        found |= {name: state for name, state in states.items() if state is not None}
    return found


def _kept(engine: zw.Engine, name: str) -> list[str]:
    """What the optimizer keeps of a parameter, and of most others: so it says where it is asked for something else."""
    with pytest.raises(zw.EngineError) as caught:
        engine.full(name, "something else")
    found = re.search("; it holds (?!nothing of it)(.*)", str(caught.value))
    return found[1].split(", ") if found else []


def _state(engine: zw.Engine, name: str, key: str) -> Tensor | None:
    try:
        state = engine.full(name, key)
    except zw.EngineError:  # it has none
        return None
    assert state is not None
    return state.cpu()


def own(engine: zw.Engine) -> Facts:
    """What else there is to a run on this rank; its random numbers are drawn from copies."""
    groups: list[Mapping[str, Any]] = [] if engine.optimizer is None else engine.optimizer.param_groups
    numpy, cpu = np.random.RandomState(), torch.Generator()
    numpy.set_state(np.random.get_state(legacy=True))
    cpu.set_state(torch.get_rng_state())
    python = random.Random()
    python.setstate(random.getstate())
    return {
        "counters": (engine.global_steps, engine.micro_steps),
        "loss scale": engine.loss_scale,
        "lr": [float(group["lr"]) for group in groups],
        "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.last_epoch,
        "random numbers": (python.random(), float(numpy.rand()), float(torch.rand(1, generator=cpu))),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
    }


def differing(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two values differ, by their bits; not in the order of dictionaries."""
    if isinstance(a, dict) and isinstance(b, dict):
        only = [f"{where} {key}: only in one" for key in sorted(a.keys() ^ b.keys())]
        return only + [line for key in a.keys() & b.keys() for line in differing(a[key], b[key], f"{where} {key}")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b)]
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
        return [] if same else [f"{where}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"]
    return [] if a == b and type(a) is type(b) else [f"{where}: {a} and {b}"]


def distant(expected: Facts, found: Facts, bound: float) -> list[str]:
    """The tensors that are farther from what is expected than `bound` times its largest element."""
    assert expected.keys() == found.keys()
    told = []
    for name, wanted in expected.items():
        mine = found[name]
        if wanted is None or mine is None:
            told += [] if wanted is mine else [f"{name}: only in one"]
        elif wanted.numel() and float((wanted.double() - mine.double()).abs().max()) > bound * float(
            wanted.double().abs().max()
        ):
            told.append(f"{name}: {wanted} and {mine}")
    return told


def everything(engine: zw.Engine) -> Facts:
    return {"values": values(engine), "own": own(engine)}


def seed_ranks() -> None:
    """Each rank draws numbers of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)


def saved_and_gone_on(folder: Path, before: int, after: int, engine: zw.Engine, **more: Any) -> tuple[Facts, Facts]:
    """Trains, saves, trains on: the run as it was saved, and at its end with the losses behind that."""
    with engine:
        seed_ranks()
        train(engine, before)
        engine.save(folder, client_state={"steps": (before,)}, **more)
        saved = everything(engine)
        losses = train(engine, after)
        return saved, {**everything(engine), "losses": losses}


def gone_on(folder: Path, before: int, after: int, engine: zw.Engine) -> tuple[Facts, Facts]:
    """Loads, and trains on: the run as it was loaded, and at its end."""
    with engine:
        assert engine.load(folder) == {"steps": (before,)}
        loaded = everything(engine)
        losses = train(engine, after)
        return loaded, {**everything(engine), "losses": losses}
