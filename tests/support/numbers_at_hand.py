"""More of `tests.support.programs`: numbers and words that models and losses have at hand, and that change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.programs import batches
from tests.support.replays import WIDTH, Case, Net, batch_of, loss_fn, micro_step

SCALE = 1.0
loss = 0.0


class Weighted(Net):
    """Computes with numbers of its own, of its class, of its module's globals, and with what is None at first."""

    of_class = 1.0

    def forward(self, x: Tensor, factor: Tensor) -> dict[str, Any]:
        self.calls += 1
        if not self.training:
            self.evaluations += 1
        output = super().forward(x * self.alpha * self.of_class * SCALE, factor)
        return {**output, "loss": output["loss"] * self._weight()}

    def _weight(self) -> Any:
        weight = 1.0 if self.memory is None else self.memory.mean()
        return weight * (2.0 if self.kind == "twice" else 1.0)


class Criterion:
    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: Any, batch: Any) -> Tensor:
        loss: Tensor = output["loss"] * self.weight
        return loss


def weighted(engine: Any) -> Any:
    model = engine.module
    model.__class__ = Weighted
    model.alpha, model.kind, model.memory, model.calls, model.evaluations = 1.0, "once", None, 0, 0
    return model


def set_now_and_then(engine: Any) -> Iterator[Any]:
    """One after the other of them gets another value."""
    global SCALE
    model, criterion, SCALE = weighted(engine), Criterion(), 1.0
    for step, batch in batches(110):
        model.step = step  # which no code of the model names
        match step:
            case 14:
                model.alpha = 2.0
            case 30:
                model.blocks[0].dropout.p = 0.5
            case 46:
                SCALE = 0.5
            case 62:
                criterion.weight = 3.0
            case 78:
                model.of_class = 1.5
            case 94:
                model.kind, model.memory = "twice", torch.full((WIDTH,), 0.7)
        yield engine.train_step(batch, criterion)


def counted_and_not_used(engine: Any) -> Iterator[Any]:
    """The model counts its calls, also those of evaluations, and computes nothing with that; nor with the script's."""
    global loss
    model = weighted(engine)
    for step, batch in batches():
        if step % 2:
            engine.eval()
            with torch.no_grad():
                yield engine(*batch)["loss"]
            engine.train()
        loss = engine.train_step(batch, lambda output, batch: output["loss"] * batch[0].shape[-1]).item()
        yield torch.tensor(loss)
    assert model.calls > 0 and model.evaluations > 0


def annealed(engine: Any) -> Iterator[Any]:
    """Each step has a number of its own."""
    model = weighted(engine)
    for step, batch in batches(24):
        model.alpha = 1.0 / (1 + step)
        yield engine.train_step(batch, loss_fn)


def set_within(engine: Any, loop: str = "train_step") -> Iterator[Any]:
    """Each micro-step of a window has a number of its own, the same in all windows."""
    model = weighted(engine)
    for step in range(20):
        for micro in range(2):
            model.alpha = 1.0 + micro
            yield micro_step(engine, Case(gas=2, loop=loop), batch_of(Case(), step, micro))


def behind_backward(engine: Any) -> Iterator[Any]:
    """Each step has a number of its own, which is set between a backward and its step."""
    model = weighted(engine)
    for step in range(20):
        for micro in range(2):
            loss = engine(*batch_of(Case(), step, micro))["loss"]
            engine.backward(loss)
            model.alpha = 1.0 + micro
            engine.step()
            yield loss.detach()


def in_a_block(engine: Any) -> Iterator[Any]:
    """Each forward of a coalesced block has a number of its own."""
    model = weighted(engine)
    for step in range(20):
        with engine.coalesce_grad_reduction():
            for micro in range(2):
                model.alpha = 1.0 + micro
                loss = engine(*batch_of(Case(), step, micro))["loss"]
                engine.backward(loss)
                yield loss.detach()
        engine.step()


def by_a_scheduler(engine: Any) -> Iterator[Any]:
    """The engine's scheduler sets a number of the model, in each step, for the next one."""
    model, plain = weighted(engine), engine.lr_scheduler.step

    def step() -> None:
        plain()
        model.alpha *= 0.9

    engine.lr_scheduler.step = step
    for _, batch in batches():
        yield engine.train_step(batch, loss_fn)


def every_fourth(engine: Any) -> Iterator[Any]:
    model = weighted(engine)
    for step, batch in batches(60):
        if step % 4 == 0:
            model.alpha = 1.0 / (1 + step)
        yield engine.train_step(batch, loss_fn)


def two_losses(engine: Any) -> Iterator[Any]:
    """In turn; the number of one of them changes with each step, the other's once."""
    weighted(engine)
    first, second = Criterion(), Criterion()
    for step, batch in batches(60):
        first.weight = 1.0 / (1 + step)
        second.weight = 2.0 if step > 40 else 1.0
        yield engine.train_step(batch, first if step % 2 else second)
