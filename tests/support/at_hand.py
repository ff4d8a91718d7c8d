"""More of `tests.support.programs`: what they have at hand, keep and replace, and gradients of which no loss tells."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatched

from tests.support.graphs import Tape
from tests.support.programs import batches, becomes
from tests.support.replays import WIDTH, Case, Net, batch_of, loss_fn


class Table:
    def __init__(self, value: float) -> None:
        self.table = torch.full((WIDTH,), value)


class Slotted:
    __slots__ = ("table",)

    def __init__(self, value: float) -> None:
        self.table = torch.full((WIDTH,), value)


TABLE = Table(1.0).table


class Tabled(Net):
    """Reads tensors that it has at hand in five ways."""

    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Any]:
        own, plain, slotted = self.at_hand
        return super().forward(x * own * plain.table * slotted.table * self.mask * TABLE, factor)


def replaced(engine: Any) -> Iterator[Any]:
    """One after the other of them gets other memory: the same tensor with other data, or another tensor."""
    global TABLE
    model, TABLE = engine.module, Table(1.0).table
    model.__class__ = Tabled
    model.at_hand = [torch.ones(WIDTH), Table(1.0), Slotted(1.0)]
    model.register_buffer("mask", torch.ones(WIDTH), persistent=False)
    own, plain, slotted = model.at_hand
    for step, batch in batches(156):
        match step:
            case 14:
                own.data = torch.full((WIDTH,), 2.0)
            case 38:
                plain.table = torch.full((WIDTH,), 0.5)
            case 62:
                slotted.table = torch.full((WIDTH,), 3.0)
            case 86:
                model.at_hand[1] = Table(1.5)
            case 110:
                model.mask.data = torch.full((WIDTH,), 0.7)
            case 134:
                TABLE = torch.full((WIDTH,), 1.2)
            case 150:
                own.data.mul_(0.5)  # where it is
        yield engine.train_step(batch, loss_fn)


class _Scaled(torch.autograd.Function):
    """What it gives is what it is given; the gradient is another one in a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1.5 if any(isinstance(mode, Tape) for mode in dispatched()) else 1.0)


def wrong(engine: Any, overflow: int | None = None) -> Iterator[Any]:
    """The graph's gradients are wrong, and no loss tells of it; nor anything else in a step that overflows."""

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        output = plain(x, factor)
        return {**output, "loss": _Scaled.apply(output["loss"])}

    becomes(engine, forward)
    for step in range(16):
        yield engine.train_step(batch_of(Case(overflow=overflow), step, 0), loss_fn)


class Attributes(dict[str, Any]):
    """A batch whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Counted(UserDict[str, Any]):
    """A batch with a number beside its items."""

    def __init__(self, number: int, **items: Any) -> None:
        super().__init__(items)
        self.number = number


@dataclass
class Lazy:
    x: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        self.half = self.x / 2

    @cached_property
    def weight(self) -> Tensor:
        return self.x.square().mean() + self.half.mean()


def attributes(engine: Any) -> Iterator[Any]:
    """Batches that keep more than their items or fields, or compute it."""

    def forward(model: Any, plain: Any, batch: Any) -> Any:
        x = batch["x"] if isinstance(batch, Counted) else batch.x
        weight = batch.weight if isinstance(batch, Lazy) else getattr(batch, "number", 2) / 2
        output = plain(x, torch.ones(()))
        return {**output, "loss": output["loss"] * weight}

    becomes(engine, forward)
    for step, (x, factor) in batches(60):
        made = (Attributes(x=x, factor=factor), Lazy(x, factor), Counted(step % 2, x=x, factor=factor))
        yield engine.train_step((made[step % 3],), loss_fn)


def in_place(engine: Any) -> Iterator[Any]:
    """What the model returns is written in place."""
    for _, batch in batches():
        output = engine(*batch)
        loss = output["loss"]
        loss += 0.1 * output["spread"]
        loss /= 2
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def cycled(engine: Any) -> Iterator[Any]:
    """The engine's own scheduler changes more than rates: once, behind a step that is tried."""
    for _, batch in batches(30):
        yield engine.train_step(batch, loss_fn)


def drawn(engine: Any, draw: Callable[[], float]) -> Iterator[Any]:
    """The host decides by random numbers of its own, rarely."""
    random.seed(0)
    numpy.random.seed(0)
    becomes(engine, lambda model, plain, x, factor: plain(x * (2.0 if draw() < 0.1 else 1.0), factor))
    for _, batch in batches(40):
        yield engine.train_step(batch, loss_fn)
    yield torch.tensor(draw())


def stashed(engine: Any) -> Iterator[Any]:
    """The model keeps something for the next step, as the memory of Transformer-XL."""
    engine.module.memory = torch.zeros(())

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        output = plain(x + model.memory, factor)
        model.memory = output["spread"].detach()
        return output

    becomes(engine, forward)
    for _, batch in batches():
        yield engine.train_step(batch, loss_fn)


def rebound(engine: Any) -> Iterator[Any]:
    """As `stashed`, in a buffer that no loss tells of."""
    engine.module.register_buffer("seen", torch.zeros(()))

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        model.seen = 0.9 * model.seen + x.mean()
        return plain(x, factor)

    becomes(engine, forward)
    for _, batch in batches():
        yield engine.train_step(batch, loss_fn)
    yield engine.module.seen


def aside(engine: Any) -> Iterator[Any]:
    """The loss takes something that the model keeps beside what it returns, with its way back."""

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        output = plain(x, factor)
        model.aux = output["spread"]
        return output

    becomes(engine, forward)
    for _, batch in batches():
        loss = engine(*batch)["loss"] + 0.1 * engine.module.aux
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def endless(engine: Any) -> Iterator[Any]:
    """From some step on, all overflow."""
    for step in range(42):
        yield engine.train_step(batch_of(Case(overflow=step if step > 6 else None), step, 0), loss_fn)


def counted(engine: Any) -> Iterator[Any]:
    """The backward computes with a number that the host counts, and no loss tells of it."""
    count = [0]

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        def slower(gradient: Tensor) -> Tensor:
            count[0] += 1
            return gradient * (1 + count[0] / 50)

        output = plain(x, factor)
        output["loss"].register_hook(slower)
        return output

    becomes(engine, forward)
    for _, batch in batches(30):
        yield engine.train_step(batch, loss_fn)
