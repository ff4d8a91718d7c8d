"""Jobs that train with `engine.coalesce_grad_reduction()` and beside it: gradients, collectives, compilations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.counting import counted
from tests.support.marks import WITH_INDUCTOR as MODES
from tests.support.models import entry
from tests.support.reference import (
    CHECKED,
    TRAINED,
    Exactly,
    Expected,
    build,
    doubled,
    draw,
    judge,
    set_lr,
    sgd,
    train_reference,
)
from tests.support.zoo import Entry

BUCKETS = {"slot": {"bytes": 1}, "default": {}, "tiny": {"bytes": 3000}}
"""One parameter in each bucket, one block, and pieces of blocks."""
EPSILON = 2.0**-8


@dataclass(frozen=True)
class Setting:
    stage: int
    mode: str
    depth: int = 2
    bucket: str = "default"
    params: str | None = None

    def __str__(self) -> str:
        return f"z{self.stage}-{self.mode}-depth{self.depth}-{self.bucket}-{self.params or 'fp32'}"

    def config(self, **more: Any) -> dict[str, Any]:
        own = {"stage": self.stage, "compile": MODES[self.mode], "bucket": BUCKETS[self.bucket]}
        return {**own, "reduce": {"depth": self.depth}, "precision": {"params": self.params}, **more}


@dataclass(frozen=True)
class Window:
    """One rank's figures of the window of N backwards; differences are relative, `errors` are those to the fp64 sum.

    `bounded` is what `judge` says of the coalesced sum beside the plain windows' (fp32 only), `difference` that of all
    together. The counts say how often a flat of that many elements was reduced, as the profiler tells.
    """

    n: int
    bounded: tuple[float, str]
    difference: float
    plain_error: float
    coalesced_error: float
    plain_reductions: Counter[int]
    coalesced_reductions: Counter[int]


def initialize(module: nn.Module, config: dict[str, Any]) -> Any:
    trainable = [p for p in module.parameters() if p.requires_grad]
    return zw.initialize(module, sgd(trainable), {"deadline_seconds": 200.0, **config})


@contextlib.contextmanager
def window(engine: Any, coalesce: bool) -> Iterator[None]:
    with engine.coalesce_grad_reduction() if coalesce else contextlib.nullcontext():
        yield


def backwards(engine: Any, model: Entry, n: int, coalesce: bool) -> None:
    """A window of `n` backwards up to its step, each loss divided by `n`."""
    rank = engine.rank
    with window(engine, coalesce):
        for index in range(n):
            engine.set_gradient_accumulation_boundary(index == n - 1)
            draw(rank, index)
            model.micro(engine, engine.module, model.batch(rank, index), lambda loss: engine.backward(loss / n))
    engine.set_gradient_accumulation_boundary(None)


def reductions_of(engine: Any, model: Entry, n: int, coalesce: bool) -> Counter[int]:
    """The same; size of a reduction -> how often, as the profiler tells."""
    with counted() as seen:
        backwards(engine, model, n, coalesce)
        engine.gradients()  # a profiler that ends while a collective is under way may end the process
    return Counter(numel for kind, numel in seen if kind == "reduce_scatter")


def fp64_sum(model: Entry, n: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The mean over ranks of the sum of `n` gradients in fp64, each computed by the unsharded model in `dtype`.

    Without one everything is in fp64.
    """
    rank, module = dist.get_rank(), build(model).to(dtype or torch.float64)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}

    def call(x: Tensor) -> Any:
        return module(x if dtype is None or not x.is_floating_point() else x.to(dtype))

    for index in range(n):
        draw(rank, index)
        with contextlib.nullcontext() if dtype else Exactly():
            model.micro(call, module, model.batch(rank, index), lambda loss: (loss / n).backward())
        for name, p in named.items():
            if p.grad is not None:
                sums[name] += p.grad.double()
                p.grad = None
    for total in sums.values():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return sums


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The Euclidean distance of all gradients together, relative to their norm."""
    squares = [(got[name].double() - value.double()).square().sum() for name, value in expected.items()]
    norms = [value.double().square().sum() for value in expected.values()]
    return float((torch.stack(squares).sum() / torch.stack(norms).sum()).sqrt())


def matrix(setting: Setting, name: str, counts: tuple[int, ...]) -> tuple[list[Window], Counter[int], bool]:
    """For each N the coalesced window beside the plain one. Further: the buckets' sizes; was all compiled once?"""
    model, found = entry(name), []
    dtype = None if setting.params is None else getattr(torch, setting.params)
    compiled: set[tuple[int, int]] = set()
    with initialize(build(model), setting.config()) as engine:
        for n in counts:
            exact = fp64_sum(model, n, dtype)
            gradients, reductions = [], []
            for coalesce in (False, True):
                reductions.append(reductions_of(engine, model, n, coalesce))
                gradients.append({k: v for k, v in engine.gradients().items() if v is not None})
                engine.step()
                compiled.add((engine.stats.templates, engine.stats.graphs))
            plain, coalesced = gradients
            found.append(
                Window(
                    n=n,
                    bounded=judge(coalesced, Expected(plain, exact)) if dtype is None else (0.0, ""),
                    difference=distance(coalesced, plain),
                    plain_error=distance(plain, exact),
                    coalesced_error=distance(coalesced, exact),
                    plain_reductions=reductions[0],
                    coalesced_reductions=reductions[1],
                )
            )
        assert (engine.stats.compiled_calls > 0) == (setting.mode != "eager")
        return found, Counter(b.numel for b in engine.buckets if b.trainable), len(compiled) == 1


def train(setting: Setting, name: str, n: int, config: dict[str, Any]) -> tuple[list[Any], Any, list[int], int]:
    """Coalesced training beside the reference's: differences of gradients and parameters, reductions, departures."""
    model = entry(name)
    expected = train_reference(model, n)
    differences, reductions = [], []
    with initialize(build(model), setting.config(**model.config, **config)) as engine:
        buckets = sum(bucket.trainable for bucket in engine.buckets)
        for step in range(CHECKED + TRAINED):
            set_lr(engine.optimizer, step, model.lr)
            with engine.coalesce_grad_reduction():
                for index in range(step * n, (step + 1) * n):
                    draw(engine.rank, index)
                    batch = model.batch(engine.rank, index)
                    model.micro(engine, engine.module, batch, lambda loss, **more: engine.backward(loss / n, **more))
            if step < CHECKED:
                differences.append(judge(engine.gradients(), expected.gradients[step]))
            assert engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.was_step_applied() and engine.micro_steps == step + 1
            reductions.append(engine.stats.last_step["reduce_scatter"].calls)
        departures = engine.stats.departures
        with engine.full_parameters() as full:
            return differences, judge(full, expected.parameters), [buckets, *reductions], departures


@dataclass(frozen=True)
class Course:
    """What training was like: each step's loss scale, whether it was applied and its norm; the change of parameters."""

    scales: list[float]
    applied: list[bool]
    norms: list[float | None]
    moved: dict[str, Tensor]


def courses(
    setting: Setting, config: dict[str, Any], name: str, n: int, steps: int, exact: bool
) -> tuple[Course, Course, Course | None]:
    """The same training with plain windows of `n` backwards and with coalesced ones; `exact`: and in float64."""
    model, found = entry(name), []
    start = {key: p.detach() for key, p in build(model).named_parameters()}
    for coalesce, wide in ((False, False), (True, False), (False, True))[: 3 if exact else 2]:
        scales, applied, norms = [], [], []
        data = replace(model, batch=lambda *which: doubled(model.batch(*which))) if wide else model
        module = build(model).double() if wide else build(model)
        with initialize(module, {**setting.config(), **config}) as engine:
            set_lr(engine.optimizer, CHECKED, model.lr)
            for _ in range(steps):
                scales.append(engine.loss_scale)
                backwards(engine, data, n, coalesce)
                engine.set_gradient_accumulation_boundary(True)
                engine.step()
                applied.append(engine.was_step_applied())
                norms.append(engine.get_global_grad_norm())
            with engine.full_parameters() as full:
                found.append(Course(scales, applied, norms, {k: p.detach() - start[k] for k, p in full.items()}))
    return found[0], found[1], found[2] if exact else None
