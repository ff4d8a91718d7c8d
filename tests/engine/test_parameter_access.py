"""Values in training loops that step off the plain path, each beside the same model in plain PyTorch.

What must hold everywhere: the gradients and values are PyTorch's, or the call is refused by name and changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import zeroweave as zw
from tests.support.marks import FEW, MODES, STAGES, slow
from tests.support.reference import judge
from tests.support.twins import GATHERED, MODE, SOME, WIDTH, Multiplying, Net, learn, loss_of, rows, twins
from zeroweave.errors import EngineError, ParameterError


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
            for net in plain.nets:
                net.load_state_dict({name: torch.full_like(t, value) for name, t in net.state_dict().items()})
            if gather:
                assert all((p == value).all() for p in engine.module.parameters())
            with torch.no_grad():
                both.assert_equal_outputs()
            engine.backward(loss_of(engine, round_))
            both.plain.each(learn, round_)
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
        both.plain.each(learn)
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
            both.plain.each(learn, step)
            with engine.full_parameters() as full, torch.no_grad():
                found = judge(full, plain.values())
                assert found[0] <= 1, found
                if step % 2:
                    for parameters in (full, *(dict(net.named_parameters()) for net in plain.nets)):
                        parameters["blocks.1.up.weight"].mul_(0.5)
                        parameters["leave.bias"].fill_(0.25)
            if gather:
                found = judge(dict(engine.module.named_parameters()), plain.values())
                assert found[0] <= 1, found
            both.assert_equal_gradients()
            both.step()
            if gather:
                found = judge(dict(engine.module.named_parameters()), plain.values())
                assert found[0] <= 1, found
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
        both.plain.each(learn)
        refused: dict[str, Callable[[], object]] = {
            "full_parameters": lambda: engine.full_parameters().__enter__(),
            "step": engine.step,
            "state_dict": engine.state_dict,
            "load_state_dict": lambda: engine.load_state_dict(saved),
        }
        with engine.full_parameters() as full:
            with torch.no_grad():
                full["enter.weight"].fill_(0.125)
                for net in plain.nets:
                    net.get_parameter("enter.weight").fill_(0.125)
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
        both.plain.each(learn)
        with engine.full_parameters() as full, torch.no_grad():
            full["enter.weight"].fill_(0.125)
            for net in plain.nets:
                net.get_parameter("enter.weight").fill_(0.125)
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
                for parameters in (full, *(dict(net.named_parameters()) for net in plain.nets)):
                    for parameter in parameters.values():
                        parameter.mul_(0.5)
                both.assert_equal_outputs()
                for parameters in (full, *(dict(net.named_parameters()) for net in plain.nets)):
                    for name, parameter in parameters.items():
                        parameter.copy_(own[name])
                both.assert_equal_outputs()
            both.assert_equal_values()


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
    masters = {name: engine.full(name).to(dtype, copy=True) for name, dtype in dtypes.items()}
    expected = masters | engine.state_dict() if steps else given  # which is empty on all ranks but the first
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    engine.destroy()
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(type(p) is nn.Parameter and p.requires_grad and p.grad is None for p in parameters)
    now = model.state_dict()
    assert now.keys() == given.keys() and all(torch.equal(now[name], expected[name]) for name in expected)
    fine = now["enter.weight"]
    assert not torch.equal(fine, fine.bfloat16().float()), "the masters have more than bfloat16's digits"
    for name, buffer in model.named_buffers():
        object_, value = buffers[name]
        assert buffer is object_ and buffer.dtype == given[name].dtype and torch.equal(buffer, value)
    assert int(model.get_buffer("calls")) == steps
    if steps:
        assert not torch.equal(now["enter.weight"], given["enter.weight"])


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


@slow("aot_eager-3")
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


@pytest.mark.matrix
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


@pytest.mark.matrix
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
