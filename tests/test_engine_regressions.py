"""Training loops that step off the plain path, each beside the same model in plain PyTorch, in a world of 1.

What must hold everywhere: the gradients and values are PyTorch's, or the call is refused by name and changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import zeroweave as zw
from tests.distributed.reference import worst
from zeroweave.errors import EngineError, ParameterError

WIDTH = 8
TOLERANCE = 1e-6
MODES = {"eager": {"enabled": False}, "aot_eager": {"lower": "aot_eager"}}
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SOME = pytest.mark.parametrize(("stage", "mode"), [(1, "eager"), (2, "aot_eager"), (3, "eager"), (3, "aot_eager")])
GATHERED = pytest.mark.parametrize(
    ("stage", "gather", "mode"),
    [
        (1, True, "eager"),
        (2, True, "aot_eager"),
        (1, False, "aot_eager"),
        (2, False, "eager"),
        (3, False, "eager"),
        (3, False, "aot_eager"),
    ],
)
FEW = pytest.mark.parametrize(("stage", "mode"), [(1, "eager"), (3, "aot_eager")])
MODE = pytest.mark.parametrize("mode", list(MODES))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """An eager first and last layer around three equal blocks, which are compiled where anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.leave = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.hidden(x))


def rows(index: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index + 1))


def loss_of(call: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    return call(rows(index)).pow(2).mean()


def penalty(parameters: Iterable[Tensor]) -> Tensor:
    return 0.1 * torch.stack([p.pow(2).sum() for p in parameters]).sum()


def values_of(engine: Any) -> dict[str, Tensor]:
    """Copies of the engine's full values by name."""
    with engine.full_parameters() as full:
        return {name: parameter.detach().clone() for name, parameter in full.items()}


@dataclass
class Twins:
    """One model under an engine and the same one in plain PyTorch, both under SGD."""

    engine: Any
    plain: Any
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        self.engine.step()
        if self.engine.was_step_applied():
            self.optimizer.step()
            self.optimizer.zero_grad()

    def assert_equal_gradients(self) -> None:
        expected = {name: parameter.grad for name, parameter in self.plain.named_parameters()}
        found = worst(self.engine.gradients(), expected)
        assert found[0] <= TOLERANCE, found

    def assert_equal_values(self) -> None:
        found = worst(values_of(self.engine), {name: p.detach() for name, p in self.plain.named_parameters()})
        assert found[0] <= TOLERANCE, found

    def assert_still_trains(self) -> None:
        """An ordinary step from here on is PyTorch's."""
        self.engine.backward(loss_of(self.engine, 77))
        loss_of(self.plain, 77).backward()
        self.assert_equal_gradients()
        self.step()
        self.assert_equal_values()


@contextlib.contextmanager
def twins(
    stage: int, mode: str, build: Callable[[], nn.Module] = Net, lr: float = 0.1, **settings: Any
) -> Iterator[Twins]:
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    config = {"stage": stage, "compile": MODES[mode], **settings}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr), config) as engine:
        yield Twins(engine, plain, torch.optim.SGD(plain.parameters(), lr))
        if mode != "eager" and engine.global_steps:
            assert engine.stats.compiled_calls > 0, "the compiled path was not taken"


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


INPUT_GRADIENTS = {"leaf": grad_of_leaf, "inner": grad_of_inner, "inputs": backward_of_inputs}


@SOME
@pytest.mark.parametrize("kind", INPUT_GRADIENTS)
def test_gradients_of_inputs_leave_the_window_empty(stage: int, mode: str, kind: str) -> None:
    """They deliver nothing; the backward after them, through the same graph or another, delivers everything once."""
    with twins(stage, mode, Tapped) as both:
        for step in range(4):
            loss, gradient = INPUT_GRADIENTS[kind](both.engine, step)
            plain_loss, expected = INPUT_GRADIENTS[kind](both.plain, step)
            assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)
            assert all(g is None for g in both.engine.gradients().values())
            assert all(p.grad is None for p in both.plain.parameters())
            if step % 2:  # the graph whose inputs were asked for; else one of its own
                both.engine.backward(loss)
                plain_loss.backward()
            else:
                del loss, plain_loss
                both.engine.backward(both.engine(rows(50 + step))[0].pow(2).mean())
                both.plain(rows(50 + step))[0].pow(2).mean().backward()
            both.assert_equal_gradients()
            both.step()
        both.assert_equal_values()


@SOME
def test_gradients_of_inputs_behind_the_losss_own_backward(stage: int, mode: str) -> None:
    """What `engine.backward` said of that backward does not hold for later ones of the same loss."""
    with twins(stage, mode, Tapped) as both:
        loss, plain_loss = both.engine(rows())[0].pow(2).mean(), both.plain(rows())[0].pow(2).mean()
        both.engine.backward(loss, retain_graph=True)
        plain_loss.backward(retain_graph=True)
        both.step()
        x = rows(1).requires_grad_()
        loss, plain_loss = both.engine(x)[0].pow(2).mean(), both.plain(x)[0].pow(2).mean()
        both.engine.backward(loss, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x)
        plain_loss.backward(retain_graph=True)
        (expected,) = torch.autograd.grad(plain_loss, x)
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)
        both.assert_equal_gradients()
        both.engine.zero_grad()
        both.optimizer.zero_grad()
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


# ---------------------------------------------------------------------- loading while something is gathered
def filled(engine: Any, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in engine.state_dict().items()}


@GATHERED
def test_what_is_loaded_is_what_the_next_forward_sees(stage: int, gather: bool, mode: str) -> None:
    """Before the first step, after inference, after a step: never a value from before the load."""
    with twins(stage, mode, gather_after_step=gather) as both:
        engine, plain = both.engine, both.plain
        for round_, value in enumerate((0.05, -0.03, 0.02)):
            if round_ > 0:
                engine.backward(loss_of(engine))
                engine.step()
            with torch.no_grad():
                engine(rows())  # leaves kept buckets gathered
            engine.load_state_dict(filled(engine, value))
            plain.load_state_dict({name: torch.full_like(t, value) for name, t in plain.state_dict().items()})
            if gather:
                assert all((p == value).all() for p in engine.module.parameters())
            with torch.no_grad():
                assert torch.equal(engine(rows()), plain(rows()))
            engine.backward(loss_of(engine, round_))
            loss_of(plain, round_).backward()
            both.assert_equal_gradients()
            both.step()
            both.assert_equal_values()


@FEW
def test_a_graph_from_before_a_load_is_not_differentiated(stage: int, mode: str) -> None:
    with twins(stage, mode) as both:
        late = loss_of(both.engine)
        both.engine.load_state_dict(both.engine.state_dict())
        with pytest.raises(RuntimeError):
            both.engine.backward(late)
        del late
        both.engine.zero_grad()
        both.assert_still_trains()


@STAGES
def test_a_load_while_gradients_wait_is_refused(stage: int) -> None:
    with twins(stage, "eager") as both:
        engine = both.engine
        engine.backward(loss_of(engine))
        loss_of(both.plain).backward()
        with pytest.raises(EngineError, match="gradients wait"):
            engine.load_state_dict({})
        both.assert_equal_gradients()
        both.step()
        both.assert_equal_values()


# ---------------------------------------------------------------------- full_parameters
@GATHERED
def test_full_parameters_between_backward_and_step(stage: int, gather: bool, mode: str) -> None:
    """Reading keeps the waiting gradients; a write is what the step then starts from."""
    with twins(stage, mode, gather_after_step=gather) as both:
        engine, plain = both.engine, both.plain
        for step in range(4):
            engine.backward(loss_of(engine, step))
            loss_of(plain, step).backward()
            with engine.full_parameters() as full, torch.no_grad():
                assert all(torch.equal(full[name], p) for name, p in plain.named_parameters())
                if step % 2:
                    for parameters in (full, dict(plain.named_parameters())):
                        parameters["blocks.1.up.weight"].mul_(0.5)
                        parameters["leave.bias"].fill_(0.25)
            if gather:
                assert all(
                    torch.equal(p, q) for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)
                )
            both.assert_equal_gradients()
            both.step()
            if gather:
                assert all(
                    torch.equal(p, q) for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)
                )
            both.assert_equal_values()


@pytest.mark.parametrize(
    ("stage", "gather", "mode"), [(1, True, "eager"), (2, False, "aot_eager"), (3, False, "eager")]
)
def test_what_full_parameters_refuses_inside_changes_nothing(stage: int, gather: bool, mode: str) -> None:
    """Another one, a step and state dicts: refused by name; the write around them and the gradients stay."""
    with twins(stage, mode, gather_after_step=gather) as both:
        engine, plain = both.engine, both.plain
        both.assert_still_trains()
        saved = engine.state_dict()
        engine.backward(loss_of(engine))
        loss_of(plain).backward()
        refused: dict[str, Callable[[], object]] = {
            "full_parameters": lambda: engine.full_parameters().__enter__(),
            "step": engine.step,
            "state_dict": engine.state_dict,
            "load_state_dict": lambda: engine.load_state_dict(saved),
        }
        with engine.full_parameters() as full:
            with torch.no_grad():
                full["enter.weight"].fill_(0.125)
                plain.get_parameter("enter.weight").fill_(0.125)
            for name, attempt in refused.items():
                with pytest.raises(EngineError, match=rf"{name}\(\) inside"):
                    attempt()
                assert (full["enter.weight"] == 0.125).all()
        assert (engine.state_dict()["enter.weight"] == 0.125).all()
        both.assert_equal_gradients()
        both.step()
        both.assert_equal_values()
        both.assert_still_trains()


@STAGES
def test_a_refused_destroy_changes_nothing(stage: int) -> None:
    """Inside full_parameters: the engine, what was written and the waiting gradients are as before."""
    with twins(stage, "eager") as both:
        engine, plain = both.engine, both.plain
        engine.backward(loss_of(engine))
        loss_of(plain).backward()
        with engine.full_parameters() as full, torch.no_grad():
            full["enter.weight"].fill_(0.125)
            plain.get_parameter("enter.weight").fill_(0.125)
            with pytest.raises(EngineError, match=r"destroy\(\) inside"):
                engine.destroy()
            assert (full["enter.weight"] == 0.125).all()
        both.assert_equal_gradients()
        both.step()
        both.assert_equal_values()
        both.assert_still_trains()


@SOME
def test_weights_exchanged_for_an_evaluation_and_back(stage: int, mode: str) -> None:
    """Inside full_parameters a forward sees what was written, before and after, as in evaluation of an average."""
    with twins(stage, mode) as both:
        engine, plain = both.engine, both.plain
        for _ in range(2):
            both.assert_still_trains()
            with engine.full_parameters() as full, torch.no_grad():
                own = {name: p.clone() for name, p in full.items()}
                for parameters in (full, dict(plain.named_parameters())):
                    for parameter in parameters.values():
                        parameter.mul_(0.5)
                assert torch.equal(engine(rows()), plain(rows()))
                for parameters in (full, dict(plain.named_parameters())):
                    for name, parameter in parameters.items():
                        parameter.copy_(own[name])
                assert torch.equal(engine(rows()), plain(rows()))
            both.assert_equal_values()


# ---------------------------------------------------------------------- terms of the loss that read parameters
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
            ((loss_of(plain, index) + penalty(plain.parameters())) / gas).backward()
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
            ((loss_of(plain, index) + penalty(plain.parameters())) / gas).backward()
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
            (loss_of(plain) + penalty(plain.parameters())).backward()
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
        engine, plain = both.engine, both.plain
        before = engine.state_dict()
        for index in range(steps):
            x = rows(index).double() / 3
            with contextlib.nullcontext() if sync or index == steps - 1 else engine.no_sync():
                engine.backward(engine(x).pow(2).mean())
            (plain(x).pow(2).mean() / steps).backward()
            engine.step()
        after = engine.state_dict()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None and after[name].dtype == torch.float64
            gradient = before[name] - after[name]  # what SGD applied at a learning rate of 1
            assert float((gradient - parameter.grad).abs().max()) <= 1e-12, name


# ---------------------------------------------------------------------- destroy
class Counting(Net):
    """Keeps statistics in float32, float64 and integer buffers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.total: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(0), 0.1)
            self.total.add_(x.double().sum(0) / 3)
            self.calls.add_(1)
        return self.leave(x)


def partly_bfloat16() -> nn.Module:
    model = Counting()
    model.blocks[0].to(torch.bfloat16)
    return model


@SOME
@pytest.mark.parametrize("steps", [0, 2])
def test_destroy_gives_the_masters_back(stage: int, mode: str, steps: int) -> None:
    """Trained in bfloat16, given back in each parameter's own dtype with the masters' values; buffers as they are."""
    torch.manual_seed(0)
    model = partly_bfloat16()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    config = {"stage": stage, "compile": MODES[mode], "precision": {"params": "bfloat16"}}
    engine = zw.initialize(model, optimizer, config)
    for index in range(steps):
        engine.backward(loss_of(engine, index).float())
        engine.step()
    expected = engine.state_dict() if steps else given
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    engine.destroy()
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(type(p) is nn.Parameter and p.requires_grad and p.grad is None for p in parameters)
    now = model.state_dict()
    assert now.keys() == expected.keys() and all(torch.equal(now[name], expected[name]) for name in expected)
    fine = now["enter.weight"]
    assert not torch.equal(fine, fine.bfloat16().float()), "the masters have more than bfloat16's digits"
    for name, buffer in model.named_buffers():
        object_, value = buffers[name]
        assert buffer is object_ and buffer.dtype == given[name].dtype and torch.equal(buffer, value)
    assert int(model.get_buffer("calls")) == steps
    if steps:
        assert not torch.equal(now["enter.weight"], given["enter.weight"])


# ---------------------------------------------------------------------- reads outside of any region
class Multiplying(Net):
    """The product saves the parameter itself for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) * self.enter.weight[0].sum() * self.leave.bias + self.leave(x)


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
            loss_of(both.plain, step).backward()
            both.assert_equal_gradients()
            with torch.no_grad():
                assert torch.allclose(both.engine(rows()), both.plain(rows()), rtol=0, atol=1e-6)
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
        both.engine.module.kind = both.plain.kind = kind
        for index in range(2):
            with pytest.raises(RuntimeError, match="modified"):
                loss_of(both.plain, index).backward()
            with pytest.raises(RuntimeError, match="modified"):
                both.engine.backward(loss_of(both.engine, index))
            both.engine.zero_grad()
            both.optimizer.zero_grad()
        both.engine.module.kind = both.plain.kind = ""
        both.assert_still_trains()


@STAGES
def test_a_write_after_the_forward_is_an_error_as_in_pytorch(stage: int) -> None:
    """The caller's own input and the model's output, written between forward and backward."""
    with twins(stage, "eager", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())) as both:
        for call, target in itertools.product((both.plain, both.engine), ("input", "output")):
            x = rows()
            out = call(x)
            with torch.no_grad():
                (x if target == "input" else out).mul_(2.0)
            with pytest.raises(RuntimeError, match="modified"):
                out.sum().backward()
        both.engine.zero_grad()
        both.optimizer.zero_grad()
        both.assert_still_trains()


# ---------------------------------------------------------------------- leaks
@contextlib.contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A function that counts the live tensors made since; Dynamo's fake tensors, which hold no memory, are left out."""
    gc.collect()
    gc.freeze()  # what was there before is neither searched nor counted

    def count() -> int:
        gc.collect()
        kinds = (type(found) for found in gc.get_objects())
        return sum(issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) for kind in kinds)

    try:
        yield count
    finally:
        gc.unfreeze()


@STAGES
@MODE
def test_a_training_loop_keeps_nothing(stage: int, mode: str) -> None:
    """From the fifth step on none leaves a tensor behind, with forwards that have no backward among them."""
    torch.manual_seed(0)
    model = Multiplying()
    config = {"stage": stage, "compile": MODES[mode], "gradient_accumulation_steps": 2}
    counts = []
    with counting() as count, zw.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        for step in range(10):
            for _ in range(2):
                engine.backward(loss_of(engine, step))
                engine.step()
            engine(rows())  # never differentiated
            with torch.no_grad():
                engine(rows())
            with engine.full_parameters() as full:
                assert full["enter.weight"].isfinite().all()
            del full
            counts.append(count())
    assert max(counts[5:]) <= counts[4], counts


@FEW
def test_a_destroyed_engine_keeps_nothing(stage: int, mode: str) -> None:
    counts = []
    with counting() as count:
        for _ in range(3):
            with twins(stage, mode) as both:
                both.assert_still_trains()
            del both
            counts.append(count())
    assert counts[2] <= counts[1], counts


@STAGES
def test_a_closed_view_refuses(stage: int) -> None:
    """What the user keeps of `full_parameters()` refuses by name once it is left; nothing else is disturbed."""
    with twins(stage, "eager") as both:
        with both.engine.full_parameters() as full:
            kept = full["enter.weight"]
        del full
        with pytest.raises(ParameterError, match=r"enter\.weight"):
            kept.norm()
        both.assert_still_trains()
        with pytest.raises(ParameterError, match=r"enter\.weight"):
            kept.detach().clone()
