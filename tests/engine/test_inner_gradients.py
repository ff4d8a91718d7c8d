"""Gradients that the forward itself asks for: what a plain model gets, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES, daily
from tests.support.zoo import Block, rows

Grads = tuple[Tensor | None, ...]


class Inner(nn.Module):
    """Two blocks, each a region of its own, and what of their gradients the forward asks for."""

    def __init__(self, ask: Callable[[Inner, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self._ask = ask
        self.found: list[Grads] = []

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._ask(self, x, y)

    def grad(self, loss: Tensor, wanted: list[nn.Parameter], **more: Any) -> Grads:
        found = torch.autograd.grad(loss, wanted, **more)
        self.found.append(tuple(found))
        return found


def weighed(model: Inner, x: Tensor, y: Tensor) -> Tensor:
    """By the norm of its gradient."""
    loss = model.run(x, y)
    found = model.grad(loss, list(model.parameters()), retain_graph=True)
    return loss * torch.stack([g.square().sum() for g in found if g is not None]).sum().sqrt()


def of_some(model: Inner, x: Tensor, y: Tensor) -> Tensor:
    """Of the first block's alone, beside that of the input."""
    x = x.clone().requires_grad_()
    loss = model.run(x, y)
    found = model.grad(loss, [x, *model.blocks[0].parameters()], retain_graph=True)  # type: ignore[list-item]
    return loss + sum((g.mean() for g in found if g is not None), torch.zeros(()))


def adapted(model: Inner, x: Tensor, y: Tensor) -> Tensor:
    """Behind a step inside, which goes back into the parameters that it came from."""
    wanted = list(model.parameters())
    found = model.grad(model.run(x, y), wanted)
    names = [name for name, _ in model.named_parameters()]
    moved = {n: p - 0.1 * g for n, p, g in zip(names, wanted, found, strict=True) if g is not None}
    return torch.func.functional_call(Run(model), {f"model.{n}": value for n, value in moved.items()}, (x, y))


class Run(nn.Module):
    def __init__(self, model: Inner) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.run(x, y)


def twice(model: Inner, x: Tensor, y: Tensor) -> Tensor:
    """Once with nothing behind it, once beside what is trained, and with gradients that nobody wants in between."""
    wanted = list(model.blocks[1].parameters())
    first = model.grad(model.run(x + 1, y), wanted)
    loss = model.run(x, y)
    second = model.grad(loss, wanted, retain_graph=True)
    torch.autograd.grad(loss, list(model.blocks[0].parameters())[:1], retain_graph=True)
    pairs = zip(first, second, strict=True)
    return loss + sum(((a * b).sum().detach() for a, b in pairs if a is not None and b is not None), torch.zeros(()))


ASKS = [weighed, of_some, adapted, twice]


def plain(ask: Any, gas: int, steps: int) -> tuple[list[float], list[Grads], list[Tensor]]:
    torch.manual_seed(0)
    model = Inner(ask)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        for micro in range(gas):
            loss = model(*rows(0, step * gas + micro))
            (loss / gas).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.found, [p.detach().clone() for p in model.parameters()]


def trained(ask: Any, gas: int, steps: int, config: dict[str, Any]) -> tuple[list[float], list[Grads], list[Tensor]]:
    torch.manual_seed(0)
    model = Inner(ask)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    with zw.initialize(model, optimizer, {"gradient_accumulation_steps": gas, **config}) as engine:
        for index in range(steps * gas):
            loss = engine(*rows(0, index))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        values = engine.state_dict()
        assert (engine.stats.compiled_calls > 0) == config["compile"].get("enabled", True)
    return losses, model.found, [values[name] for name, _ in model.named_parameters()]


ROWS = [(ask, stage, mode, gas) for ask in ASKS for stage in (1, 2, 3) for mode in MODES for gas in (1, 2)]
DAILY = [*((ask, 3, "aot_eager", 1) for ask in ASKS), (weighed, 2, "aot_eager", 2), (weighed, 1, "eager", 1)]


@daily(("ask", "stage", "mode", "gas"), DAILY, [row for row in ROWS if row not in DAILY])
def test_a_forward_gets_the_gradients_that_it_asks_for(ask: Any, stage: int, mode: str, gas: int) -> None:
    """And keeps them: each is compared at the end, behind all that was reduced and updated since."""
    losses, found, values = trained(ask, gas, 4, {"stage": stage, "compile": MODES[mode]})
    expected, asked, trained_to = plain(ask, gas, 4)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(found) == len(asked)
    for mine, theirs in zip(found, asked, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(values, trained_to, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class Functional(nn.Module):
    """Asks `torch.func` for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(lambda model, x, y: model.run(x, y))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def of(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.inner, values, (x, y))

        values = dict(self.inner.named_parameters())
        found = torch.func.grad(of)(values)
        return of({name: value - 0.1 * found[name] for name, value in values.items()})


@pytest.mark.parametrize("mode", list(MODES))
def test_what_takes_no_hooks_is_refused_by_name_and_leaves_nothing_behind(mode: str) -> None:
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with zw.initialize(model, optimizer, {"stage": 3, "compile": MODES[mode]}) as engine:
        with pytest.raises(zw.EngineError, match=r"torch\.func\.grad.* inside of the model's forward"):
            engine(*rows(0, 0))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            torch.ones(2, requires_grad=True).square().sum().backward()
        engine.zero_grad()
        with torch.no_grad():
            engine.module.inner.run(*rows(0, 0))
