"""Kernels that PyTorch cannot look into train; a parameter that a forward really writes is named by an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.marks import daily
from zeroweave.errors import ParameterError
from zeroweave.runtime.writes import WATCHED

pytestmark = pytest.mark.usefixtures("flats_apart")

EAGER: dict[str, Any] = {"enabled": False}
AOT: dict[str, Any] = {"lower": "aot_eager"}


@torch.library.custom_op("zeroweave_tests::gated", mutates_args="unknown")
def gated(x: Tensor, gate: Tensor, out: Tensor, grows: bool) -> None:
    """PyTorch has to take it for one that writes to each of its arguments."""
    out.copy_(x * torch.sigmoid(gate))
    if grows:
        gate.mul_(2.0)


@torch.library.custom_op("zeroweave_tests::gated_backward", mutates_args="unknown")
def gated_backward(g: Tensor, x: Tensor, gate: Tensor, for_x: Tensor, for_gate: Tensor) -> None:
    s = torch.sigmoid(gate)
    for_x.copy_(g * s)
    for_gate.copy_((g * x * s * (1 - s)).sum(0))


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, grows: bool) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.zeroweave_tests.gated(x, gate, out, grows)
        ctx.save_for_backward(x, gate)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, gate) = gradients, ctx.saved_tensors
        for_x, for_gate = torch.empty_like(x), torch.empty_like(gate)
        torch.ops.zeroweave_tests.gated_backward(g.contiguous(), x, gate, for_x, for_gate)
        return for_x, for_gate, None


class Gated(nn.Module):
    """`grows`: its kernel really writes to the gate. `checkpoints`: it is run again, from inside of the region."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.linear, self.gate, self.grows = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), False
        self.checkpoints = checkpoints

    def compute(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(Gate.apply(x * 1.5, self.gate, self.grows)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x)


class Stack(nn.Module):
    """`checkpoints`: None, or whether regions are run again, "inside" or "around"."""

    def __init__(self, checkpoints: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(checkpoints == "inside") for _ in range(3))
        self.around = checkpoints == "around"

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x


def gated_model(checkpoints: str | None = None) -> Stack:
    torch.manual_seed(3)
    return Stack(checkpoints)


def train(engine: zw.Engine, steps: int) -> list[float]:
    torch.manual_seed(4)
    losses = []
    for _ in range(steps):
        loss = engine(torch.randn(5, 6)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_plain(model: nn.Module, steps: int) -> list[float]:
    torch.manual_seed(4)
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for _ in range(steps):
        loss = model(torch.randn(5, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def engine_of(model: nn.Module, config: Mapping[str, Any]) -> zw.Engine:
    trained = [p for p in model.parameters() if p.requires_grad]
    return zw.initialize(model, torch.optim.SGD(trained, lr=0.3, momentum=0.5), config)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@daily(
    ("stage", "how", "checkpoints"),
    [(3, EAGER, None), (3, AOT, None), (2, EAGER, "around"), (2, AOT, "around")],
    [
        *((stage, how, "inside") for stage in (1, 2, 3) for how in (EAGER, AOT)),
        *((stage, how, "around") for stage in (1, 3) for how in (EAGER, AOT)),
        *((stage, how, None) for stage in (1, 2) for how in (EAGER, AOT)),
        (3, {"lower": "inductor"}, None),
        (2, {"lower": "inductor"}, "around"),
    ],
)
def test_a_kernel_that_might_write_trains(stage: int, how: dict[str, Any], checkpoints: str | None) -> None:
    plain, steps = gated_model(checkpoints), WATCHED + 2
    expected = train_plain(plain, steps)
    engine = engine_of(gated_model(checkpoints), {"stage": stage, "compile": how})
    assert train(engine, steps) == pytest.approx(expected, rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.full(name), parameter.detach())
    assert bool(engine.stats.templates) == (how is not EAGER)
    engine.destroy()


@daily(("stage", "how"), [(3, EAGER), (3, AOT)], [(2, AOT), (1, AOT), (2, EAGER)])
def test_a_kernel_that_writes_is_named(stage: int, how: dict[str, Any]) -> None:
    """Also once others of its kind were found to leave their parameters alone."""
    engine = engine_of(gated_model(), {"stage": stage, "compile": how})
    train(engine, 2)
    engine.module.blocks[1].grows = True
    with pytest.raises(ParameterError, match=r"'blocks\.1\.gate'"):
        train(engine, 1)
    engine.destroy()


@pytest.mark.matrix
def test_a_kernel_that_comes_late_is_watched() -> None:
    """Where the first windows are over, a template of its own begins them anew."""
    engine = engine_of(gated_model(), {"stage": 3, "compile": AOT})
    train(engine, WATCHED + 2)
    engine.module.blocks[2].grows = True
    with pytest.raises(ParameterError, match=r"'blocks\.2\.gate'"):
        train(engine, 1)
    engine.destroy()


class Momentum(nn.Module):
    """An encoder, and a slow copy of it that the forward moves. It changes nothing as long as both are equal."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.fast = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        self.late -= 1
        with torch.no_grad():
            if self.late < 0:
                for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                    slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
            target = self.slow(x).roll(1, 0)
        return self.fast(x) - target


@pytest.mark.parametrize("precision", [{}, {"params": "bfloat16"}], ids=["float32", "bfloat16"])
@daily(("stage", "how"), [(1, EAGER), (3, AOT)], [(3, EAGER), (2, EAGER), (2, AOT), (1, AOT)])
def test_what_a_forward_writes_through_data_is_named(
    stage: int, how: dict[str, Any], precision: dict[str, Any]
) -> None:
    engine = engine_of(Momentum(), {"stage": stage, "compile": how, "precision": precision})
    with pytest.raises(ParameterError, match=r"'slow\.\d\.0\.weight'.*full_parameters.*docs/ema\.md"):
        train(engine, WATCHED)
    assert engine.global_steps >= 1
    engine.destroy()


def test_it_is_named_where_parameters_lie_in_host_memory() -> None:
    config = {"stage": 3, "compile": EAGER, "offload": {"params": True}}
    engine = engine_of(Momentum(), config)
    with pytest.raises(ParameterError, match=r"'slow\.\d\.0\.weight'"):
        train(engine, WATCHED)
    engine.destroy()


def test_a_forward_that_fails_tells_its_own_error() -> None:
    """And the window's next one is looked at as if it had not been."""
    with engine_of(Momentum(), {"stage": 2, "compile": EAGER}) as engine:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shape"):
                engine(torch.randn(5, 7))
            engine.zero_grad()
        with pytest.raises(ParameterError, match=r"'slow\.\d\.0\.weight'"):
            train(engine, WATCHED)


def test_a_forward_without_gradients_is_looked_at() -> None:
    engine = zw.initialize(Momentum(), None, {"stage": 3, "compile": EAGER})
    with torch.no_grad():
        with engine.full_parameters() as full:
            full["fast.0.0.weight"].add_(1.0)
            engine(torch.randn(5, 6))  # a write here is the program's own affair
        with pytest.raises(ParameterError, match=r"'slow\.0\.0\.weight'"):
            engine(torch.randn(5, 6))
    engine.destroy()


def test_writes_between_steps_are_kept() -> None:
    """What the error advises gives the numbers of plain PyTorch."""

    class Copied(Momentum):
        def __init__(self) -> None:
            super().__init__(late=100)

    def average(parameters: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name in (name for name in parameters if name.startswith("slow.")):
                parameters[name].lerp_(parameters[name.replace("slow", "fast")], 0.5)

    torch.manual_seed(5)
    model = Copied()
    plain, x = copy.deepcopy(model), torch.randn(5, 6)
    optimizer = torch.optim.SGD(plain.fast.parameters(), lr=0.3, momentum=0.5)
    with engine_of(model, {"stage": 3, "compile": EAGER}) as engine:
        for _ in range(4):
            average(dict(plain.named_parameters()))
            with engine.full_parameters() as full:
                average(full)
            losses = [module(x).square().mean() for module in (plain, engine)]
            torch.testing.assert_close(*losses)
            optimizer.zero_grad()
            losses[0].backward()
            optimizer.step()
            engine.backward(losses[1])
            engine.step()


class Later(nn.Module):
    """Its gate comes after other parameters, so that it has an offset into the memory that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), nn.ParameterList([nn.Parameter(torch.randn(6))])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(Gate.apply(x * 1.5, self.inner[0], False)))


@pytest.mark.oldest
def test_inductor_copies_what_a_kernel_may_write_from_where_it_is() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Later(), Later()), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3}) as engine:
        engine.backward(engine(x).square().mean())
        gradients = engine.gradients()
        assert engine.stats.compiled_calls > 0 and not engine.stats.eager_regions
        engine.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
