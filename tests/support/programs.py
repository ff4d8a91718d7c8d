"""Training programs that graphs must not change, each for an engine of `tests.support.loops.Net`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.loops import Case, batch_of, loss_fn

STEPS = 20


def batches(steps: int = STEPS, sizes: tuple[int, ...] = (4,)) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    yield from ((step, batch_of(Case(sizes=sizes), step, 0)) for step in range(steps))


def autocast(engine: Any) -> Iterator[Any]:
    """Around the forward only, as in the ordinary loop, and in another dtype from some step on."""
    for step, batch in batches(28):
        with torch.autocast("cpu", torch.bfloat16 if step < 16 else torch.float16):
            loss = engine(*batch)["loss"]
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def autocast_around(engine: Any) -> Iterator[Any]:
    """Autocast, which keeps the casts of parameters, around whole steps."""
    for _, batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            yield engine.train_step(batch, loss_fn)


def modes(engine: Any) -> Iterator[Any]:
    """The step is taken in other modes than the forward."""
    for _, batch in batches():
        loss = engine(*batch)["loss"]
        engine.backward(loss)
        engine.eval()
        with torch.no_grad():
            engine.step()
        engine.train()
        yield loss.detach()


def total(engine: Any) -> Iterator[Any]:
    """Losses are added up with their way back."""
    found = torch.zeros(())
    for _, batch in batches():
        loss = engine(*batch)["loss"]
        engine.backward(loss)
        engine.step()
        found = found + loss
    yield found.detach()


def shapes(engine: Any) -> Iterator[Any]:
    """Shapes that take turns, more than are captured."""
    for _, batch in batches(80, tuple(range(3, 13))):
        yield engine.train_step(batch, loss_fn)


def irregular(engine: Any) -> Iterator[Any]:
    """Exceptions of the program and of its model, and `zero_grad`, anywhere in a window; windows of other kinds."""
    for step, batch in batches(40):
        engine.module.noise = failing if step in (9, 20) else quiet
        try:
            loss = engine(*batch)["loss"]
            if step in (8, 33):
                raise KeyError
            if step % 10 == 4:  # two forwards for a loss
                loss = loss + engine(*batch_of(Case(), step + 1, 0))["loss"]
            engine.backward(loss)
            if step in (11, 25):
                raise KeyError
            if step % 10 == 6:  # one backward more, which does not reduce
                with engine.no_sync():
                    engine.backward(engine(*batch)["loss"])
            engine.step()
            yield loss.detach()
        except KeyError:
            engine.zero_grad()
        if step % 7 == 0:
            engine.zero_grad()


def quiet() -> float:
    return 0.0


def failing() -> float:
    raise KeyError


def seeded(engine: Any) -> Iterator[Any]:
    """Seeds and random numbers of the program in between."""
    for step, batch in batches():
        torch.manual_seed(step // 2)
        loss = engine(*batch)["loss"]
        torch.rand(3)
        engine.backward(loss)
        engine.step()
        yield loss.detach()
