"""Training programs that graphs must not change, each for an engine of `tests.support.loops.Net`."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.loops import Case, Net, Told, batch_of, left_by, loss_fn, started

STEPS = 20


def batches(steps: int = STEPS, sizes: tuple[int, ...] = (4,)) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    yield from ((step, batch_of(Case(sizes=sizes), step, 0)) for step in range(steps))


def step_of(engine: Any, batch: Any) -> Tensor:
    """A micro-step of the ordinary loop."""
    loss: Tensor = engine(*batch)["loss"]
    engine.backward(loss)
    engine.step()
    return loss.detach()


def becomes(engine: Any, forward: Callable[..., Any]) -> None:
    """The model's forward is `forward(model, forward of Net, …)` from now on."""
    plain = MethodType(Net.forward, engine.module)
    engine.module.forward = lambda *args, **kwargs: forward(engine.module, plain, *args, **kwargs)


# ---------------------------------------------------------------------- what a call runs under
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


# ---------------------------------------------------------------------- losses
class Criterion:
    def __init__(self) -> None:
        self.weight, self.step = torch.full((), 2.0), torch.zeros(())

    def __call__(self, output: Any, batch: Any) -> Tensor:
        loss: Tensor = output["loss"] * self.weight
        return loss

    def method(self, output: Any, batch: Any) -> Tensor:
        loss: Tensor = output["loss"] / self.weight
        return loss


def methods(engine: Any) -> Iterator[Any]:
    """A method, an object, and a function that is made anew for each call; tensors of the object are replaced."""
    criterion = Criterion()
    for step, batch in batches(54):
        criterion.step = torch.full((), float(step))  # nobody reads it
        if step == 36:
            criterion.weight = torch.full((), 3.0)
        losses = criterion.method, criterion, lambda output, batch: output["loss"]
        yield engine.train_step(batch, losses[step % 3])


def fresh(engine: Any) -> Iterator[Any]:
    """A function that has another tensor at hand each time."""
    for step, batch in batches(60):
        weight = torch.full((), 1.0 + step)
        yield engine.train_step(batch, lambda output, batch, weight=weight: output["loss"] * weight)


def criteria(engine: Any) -> Iterator[Any]:
    """A module in the closure, whose tensor is replaced, and then written."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    target = torch.zeros(1, dtype=torch.long)
    for step, batch in batches(32):
        if step == 16:
            criterion.weight = torch.tensor([2.0, 1.0])
        if step == 26:
            assert criterion.weight is not None
            criterion.weight.mul_(1.5)
        yield engine.train_step(
            batch, lambda output, batch: criterion(torch.stack([output["loss"], output["spread"]])[None], target)
        )


def trained(engine: Any) -> Iterator[Any]:
    """The loss has a parameter of its own, and an optimizer of its own trains that."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _, batch in batches():
        yield engine.train_step(batch, lambda output, batch: output["loss"] * weight)
        optimizer.step()
        optimizer.zero_grad()
        yield weight.detach().clone()


# ---------------------------------------------------------------------- what a step writes
def counts(engine: Any) -> Iterator[Any]:
    """The model counts in a tensor that is no buffer, and the loss in one of its closure."""
    model, mean = engine.module, torch.zeros(())
    model.count = torch.zeros(())

    def forward(model: Any, plain: Any, x: Tensor, factor: Tensor) -> Any:
        model.count += 1
        output = plain(x, factor)
        return {**output, "loss": output["loss"] * (1 + model.count / 100)}

    def averaged(output: Any, batch: Any) -> Any:
        mean.mul_(0.9).add_(output["loss"].detach())
        return output["loss"]

    becomes(engine, forward)
    for _, batch in batches():
        yield engine.train_step(batch, averaged)
    yield from (model.count, mean)


def writes(engine: Any) -> Iterator[Any]:
    """The model writes into its batch, which comes again."""
    batch = batch_of(Case(), 0, 0)
    becomes(engine, lambda model, plain, x, factor: plain(x.mul_(1.01), factor))
    for _ in range(STEPS):
        yield engine.train_step(batch, loss_fn)


def total(engine: Any) -> Iterator[Any]:
    """Losses are added up with their way back."""
    found = torch.zeros(())
    for _, batch in batches():
        loss = engine(*batch)["loss"]
        engine.backward(loss)
        engine.step()
        found = found + loss
    yield found.detach()


# ---------------------------------------------------------------------- batches
@dataclass(frozen=True)
class Pair:
    x: Tensor
    factor: Tensor
    note: str | None = None


def objects(engine: Any) -> Iterator[Any]:
    """Dataclasses, and mappings that PyTorch does not know."""

    def forward(model: Any, plain: Any, x: Any, factor: Any = None) -> Any:
        return plain(x.x, x.factor) if isinstance(x, Pair) else plain(x, factor)

    becomes(engine, forward)
    for step, (x, factor) in batches(26):
        batch: Any = Pair(x, factor) if step % 2 else UserDict({"x": x, "factor": factor})
        yield engine.train_step(batch, loss_fn)


def numbers(engine: Any) -> Iterator[Any]:
    """A number in the batch that is another one each time."""
    becomes(engine, lambda model, plain, x, factor, number: plain(x * (1.0 + number / 100), factor))
    for step, (x, factor) in batches(44):
        yield engine.train_step({"x": x, "factor": factor, "number": step}, loss_fn)


def shapes(engine: Any) -> Iterator[Any]:
    """Shapes that take turns, more than are captured."""
    for _, batch in batches(80, tuple(range(3, 13))):
        yield engine.train_step(batch, loss_fn)


# ---------------------------------------------------------------------- what goes wrong, and what is given up
def given_up(engine: Any) -> Iterator[Any]:
    """Exceptions of the program, and `zero_grad`, anywhere in a window."""
    for step, batch in batches(40):
        try:
            loss = engine(*batch)["loss"]
            if step in (8, 9, 20, 33):
                raise KeyError
            engine.backward(loss)
            if step in (11, 25):
                raise KeyError
            engine.step()
            yield loss.detach()
        except KeyError:
            engine.zero_grad()
        if step % 7 == 0:
            engine.zero_grad()


def failing(engine: Any) -> Iterator[Any]:
    """A model that cannot be captured, and later one that can, with other batches."""
    for step, batch in batches(40, (4, 6)):
        engine.module.reads = step < 20
        yield engine.train_step(batch if step >= 20 else batch_of(Case(), step, 0), loss_fn)


def seeded(engine: Any) -> Iterator[Any]:
    """Seeds and random numbers of the program in between."""
    for step, batch in batches():
        torch.manual_seed(step // 2)
        loss = engine(*batch)["loss"]
        torch.rand(3)
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def run(program: Callable[[Any], Iterator[Any]], case: Case, graphs: bool) -> tuple[dict[str, Any], Told]:
    """What the program yields, and all that it leaves; and what graphs did."""
    with warnings.catch_warnings(), started(case, graphs) as (engine, double):
        warnings.simplefilter("ignore")
        torch.manual_seed(7 + engine.rank)
        left = {"losses": [float(each) for each in program(engine)], **left_by(engine)}
        return left, Told(engine.stats.graphed_calls, double.captures, engine.stats.ungraphed_calls)


def compared(program: Callable[[Any], Iterator[Any]], case: Case) -> tuple[list[str], Told]:
    """What differs with graphs and without, and what they did."""
    (graphed, done), (plain, _) = run(program, case, True), run(program, case, False)
    return [what for what in plain if repr(graphed[what]) != repr(plain[what])], done
