"""Gradients in training loops that step off the plain path, each beside the same model in plain PyTorch.

What must hold everywhere: the gradients and values are PyTorch's, or the call is refused by name and changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.marks import FEW, STAGES, slow
from tests.support.reference import Expected, judge
from tests.support.twins import (
    MODE,
    SOME,
    WIDTH,
    Block,
    Multiplying,
    Net,
    learn,
    loss_of,
    penalty,
    rows,
    twins,
    values_of,
)
from zeroweave.errors import EngineError


# ---------------------------------------------------------------------- gradients of inputs only
class Tapped(nn.Module):
    """Returns the state before the last block beside the output: something inside the graph to differentiate for."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = tapped = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            tapped = x if index == 1 else tapped
        return x, tapped


def grad_of_leaf(call: Callable[..., Any], index: int) -> tuple[Tensor, Tensor]:
    x = rows(index).requires_grad_()
    loss = call(x)[0].pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert x.grad is None
    return loss, gradient


def grad_of_inner(call: Callable[..., Any], index: int) -> tuple[Tensor, Tensor]:
    """Only the last block's backward runs, and then one up to a tensor that was computed before the model."""
    start = rows(index).requires_grad_()
    x = start * 1.5
    out, tapped = call(x)
    loss = out.pow(2).mean()
    (inner,) = torch.autograd.grad(loss, tapped, retain_graph=True)
    (outer,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss, torch.cat([inner, outer])


def backward_of_inputs(call: Callable[..., Any], index: int) -> tuple[Tensor, Tensor]:
    x = rows(index).requires_grad_()
    loss = call(x)[0].pow(2).mean()
    loss.backward(inputs=[x], retain_graph=True)
    assert x.grad is not None
    gradient, x.grad = x.grad, None
    return loss, gradient


def tapped_loss(call: Callable[..., Any], x: Tensor) -> Tensor:
    return call(x)[0].pow(2).mean()


def assert_equal_of_inputs(gradient: Tensor, expected: tuple[tuple[Tensor, Tensor], ...]) -> None:
    """Beside (loss, gradient) in fp32 and in float64; the gradient of an fp32 input is fp32 there too."""
    (_, plain), (_, exact) = expected
    found = judge({"input": gradient}, Expected({"input": plain}, {"input": exact.double()}))
    assert found[0] <= 1, found


INPUT_GRADIENTS = {"leaf": grad_of_leaf, "inner": grad_of_inner, "inputs": backward_of_inputs}


@slow("leaf-2-aot_eager")
@SOME
@pytest.mark.parametrize("kind", INPUT_GRADIENTS)
def test_gradients_of_inputs_leave_the_window_empty(stage: int, mode: str, kind: str) -> None:
    """They deliver nothing; the backward after them, through the same graph or another, delivers everything once."""
    with twins(stage, mode, Tapped) as both:
        for step in range(4):
            loss, gradient = INPUT_GRADIENTS[kind](both.engine, step)
            expected = both.plain.each(INPUT_GRADIENTS[kind], step)
            assert_equal_of_inputs(gradient, expected)
            assert all(g is None for g in both.engine.gradients().values())
            assert all(p.grad is None for net in both.plain.nets for p in net.parameters())
            if step % 2:  # the graph whose inputs were asked for; else one of its own
                both.engine.backward(loss)
                for plain_loss, _ in expected:
                    plain_loss.backward()
            else:
                del loss, expected
                both.engine.backward(tapped_loss(both.engine, rows(50 + step)))
                both.plain.each(lambda net, x: tapped_loss(net, x).backward(), rows(50 + step))
            both.assert_equal_gradients()
            both.step()
        both.assert_equal_values()


@SOME
def test_gradients_of_inputs_behind_the_losss_own_backward(stage: int, mode: str) -> None:
    """What `engine.backward` said of that backward does not hold for later ones of the same loss."""
    with twins(stage, mode, Tapped) as both:
        loss = tapped_loss(both.engine, rows())
        both.engine.backward(loss, retain_graph=True)
        both.plain.each(lambda net, x: tapped_loss(net, x).backward(), rows())
        both.step()
        x = rows(1).requires_grad_()
        loss = tapped_loss(both.engine, x)
        both.engine.backward(loss, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x)

        def backward_and_grad(net: nn.Module) -> tuple[Tensor, Tensor]:
            loss = tapped_loss(net, x)
            loss.backward(retain_graph=True)
            return loss, torch.autograd.grad(loss, x)[0]

        assert_equal_of_inputs(gradient, both.plain.each(backward_and_grad))
        both.assert_equal_gradients()
        both.engine.zero_grad()
        both.plain.zero_grad()
        loss = both.engine(x)[0].pow(2).mean()
        both.engine.backward(loss, retain_graph=True)
        both.engine.zero_grad()
        torch.autograd.grad(loss, x)
        with pytest.raises(EngineError, match="without a backward"):
            both.engine.step()


@SOME
def test_after_gradients_of_inputs_nothing_waits(stage: int, mode: str) -> None:
    """The window holds no gradients: `.grad` is None, a load is served, and no backward is warned about."""
    with twins(stage, mode, Tapped, gradient_accumulation_steps=2) as both, warnings.catch_warnings():
        warnings.filterwarnings("error", message="loss.backward")
        for kind in INPUT_GRADIENTS.values():
            kind(both.engine, 0)
            assert all(p.grad is None for p in both.engine.module.parameters())
            both.engine.load_state_dict(both.engine.state_dict())


# ---------------------------------------------------------------------- terms of the loss that read parameters
def penalised(net: nn.Module, index: int, gas: int) -> None:
    ((loss_of(net, index) + penalty(net.parameters())) / gas).backward()


@STAGES
@pytest.mark.parametrize(
    ("mode", "gas", "backward"),
    [("eager", 1, "inside"), ("aot_eager", 2, "inside"), ("eager", 2, "outside"), ("aot_eager", 1, "outside")],
)
def test_a_penalty_on_full_parameters(stage: int, mode: str, gas: int, backward: str) -> None:
    """Its gradients and those of the model add up, whether the backward runs before or after leaving."""
    with twins(stage, mode, gradient_accumulation_steps=gas) as both:
        engine, plain = both.engine, both.plain
        for index in range(3 * gas):
            with engine.full_parameters() as full:
                loss = loss_of(engine, index) + penalty(full.values())
                if backward == "inside":
                    engine.backward(loss)
            del full
            if backward == "outside":
                engine.backward(loss)
            del loss
            plain.each(penalised, index, gas)
            if (index + 1) % gas == 0:
                both.assert_equal_gradients()
            both.step()
        both.assert_equal_values()


@pytest.mark.parametrize(
    ("stage", "mode", "gas"), [(1, "eager", 1), (1, "aot_eager", 2), (2, "eager", 2), (2, "aot_eager", 1)]
)
def test_a_penalty_on_what_is_gathered_after_the_step(stage: int, mode: str, gas: int) -> None:
    with twins(stage, mode, gradient_accumulation_steps=gas, gather_after_step=True) as both:
        engine, plain = both.engine, both.plain
        for index in range(3 * gas):
            engine.backward(loss_of(engine, index) + penalty(engine.module.parameters()))
            plain.each(penalised, index, gas)
            if (index + 1) % gas == 0:
                both.assert_equal_gradients()
            both.step()
        both.assert_equal_values()


@FEW
def test_a_backward_of_the_penalty_alone(stage: int, mode: str) -> None:
    """It adds to the window as any other backward, before the model's or after it."""
    with twins(stage, mode) as both:
        engine, plain = both.engine, both.plain
        for first in (True, False):
            if not first:
                engine.backward(loss_of(engine))
            with engine.full_parameters() as full:
                engine.backward(penalty(full.values()))
            del full
            if first:
                engine.backward(loss_of(engine))
            plain.each(penalised, 0, 1)
            both.assert_equal_gradients()
            both.step()
        both.assert_equal_values()


# ---------------------------------------------------------------------- float64
@SOME
@pytest.mark.parametrize("sync", [True, False])
def test_float64_accumulates_in_float64(stage: int, mode: str, sync: bool) -> None:
    """Four micro-steps, reduced each time or once: no sum of theirs is rounded to float32."""
    steps = 4
    with twins(stage, mode, lambda: Net().double(), lr=1.0, gradient_accumulation_steps=steps) as both:
        engine = both.engine
        before = values_of(engine)
        for index in range(steps):
            x = rows(index).double() / 3
            with contextlib.nullcontext() if sync or index == steps - 1 else engine.no_sync():
                engine.backward(engine(x).pow(2).mean())
            both.plain.each(lambda net, x: (net(x).pow(2).mean() / steps).backward(), x)
            engine.step()
        after = values_of(engine)
        for name, expected in both.expected_gradients().exact.items():
            assert expected is not None and after[name].dtype == torch.float64
            gradient = before[name] - after[name]  # what SGD applied at a learning rate of 1
            assert float((gradient - expected).abs().max()) <= 1e-12, name


# ---------------------------------------------------------------------- reads outside of any region
class Tied(Net):
    """The first layer's weight again at the end, through a functional call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.leave(self.hidden(x)), self.enter.weight, self.enter.bias)


class Early(Net):
    """Reads before any region has run, of a block's parameters as well, and uses them after all of them."""

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[1]
        weight, inner = self.leave.weight, block.up.weight
        norm = torch.stack([p.pow(2).sum() for p in self.blocks[0].parameters()]).sum()
        x = self.hidden(x * inner[0])
        return F.linear(x, weight * inner) * (1 + 0.1 * norm)


@STAGES
@MODE
@pytest.mark.parametrize("build", [Multiplying, Tied, Early])
def test_the_root_reads_parameters_of_its_parts(stage: int, mode: str, build: type[Net]) -> None:
    with twins(stage, mode, build) as both:
        for step in range(4):
            both.engine.backward(loss_of(both.engine, step))
            both.plain.each(learn, step)
            both.assert_equal_gradients()
            with torch.no_grad():
                both.assert_equal_outputs()
            both.step()
        both.assert_equal_values()


# ---------------------------------------------------------------------- writes to what autograd has saved
class Overwriting(Net):
    """Writes in place into a tensor of its own forward that the operator `kind` has saved, or has not."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        if self.kind == "input":  # saved by the product
            y = x * self.leave.bias.sin()
            x.add_(1.0)
        elif self.kind == "output":  # saved by the exponential
            y = x.exp()
            y.mul_(2.0)
        elif self.kind == "view":
            y = x.sigmoid()
            y[0].zero_()
        elif self.kind == "leaf":  # saved by the linear layer
            data = torch.ones(4, WIDTH)
            y = x + self.leave(data)
            data.mul_(3.0)
        else:  # nobody saves a sum; sigmoid_ saves what it has written
            y = (x + 1.0).mul_(2.0).sigmoid_()
        return self.leave(y)


@STAGES
@pytest.mark.parametrize("kind", ["input", "output", "view", "leaf"])
def test_a_write_to_a_saved_tensor_is_an_error_as_in_pytorch(stage: int, kind: str) -> None:
    with twins(stage, "eager", Overwriting) as both:
        for net in (both.engine.module, *both.plain.nets):
            net.kind = kind
        for index in range(2):
            with pytest.raises(RuntimeError, match="modified"):
                learn(both.plain.nets[0], index)
            with pytest.raises(RuntimeError, match="modified"):
                both.engine.backward(loss_of(both.engine, index))
            both.engine.zero_grad()
            both.plain.zero_grad()
        for net in (both.engine.module, *both.plain.nets):
            net.kind = ""
        both.assert_still_trains()


@STAGES
def test_a_write_after_the_forward_is_an_error_as_in_pytorch(stage: int) -> None:
    """The caller's own input and the model's output, written between forward and backward."""
    with twins(stage, "eager", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())) as both:
        for call, target in itertools.product((both.plain.nets[0], both.engine), ("input", "output")):
            x = rows()
            out = call(x)
            with torch.no_grad():
                (x if target == "input" else out).mul_(2.0)
            with pytest.raises(RuntimeError, match="modified"):
                out.sum().backward()
        both.engine.zero_grad()
        both.plain.zero_grad()
        both.assert_still_trains()
