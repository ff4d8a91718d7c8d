"""The ends of an engine: what is refused after an exception and after `destroy`, and what is left of a dropped one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import slow
from zeroweave.errors import EngineError, ParameterError
from zeroweave.optim.scaler import clip_coefficient

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
MODES = pytest.mark.parametrize("mode", ["eager", "aot_eager"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks between eager code; fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        if self.fails:
            raise ValueError("no")
        return x


class Biases(nn.Module):
    """Its backward reads no parameter: the gradients are the first sign of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Regions(nn.Module):
    """Nothing but blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def engine_of(module: nn.Module, stage: int = 3, mode: str = "eager", **settings: Any) -> Any:
    compile_ = {"enabled": False} if mode == "eager" else {"lower": mode}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return zw.initialize(module, optimizer, {"stage": stage, "compile": compile_, **settings})


def loss_of(called: Any) -> Tensor:
    return F.mse_loss(called(torch.ones(2, 8)).float(), torch.zeros(2, 8))


# ---------------------------------------------------------------------- clipping
def test_clipping_is_refused_on_a_destroyed_engine() -> None:
    engine = engine_of(Net())
    engine.destroy()
    with pytest.raises(EngineError, match="clip_grad_norm_ on a destroyed engine"):
        engine.clip_grad_norm_(1.0)


def test_clipping_is_refused_after_an_exception() -> None:
    with engine_of(Net()) as engine:
        engine.module.fails = True
        with pytest.raises(ValueError, match="no"):
            engine(torch.ones(2, 8))
        with pytest.raises(EngineError, match="clip_grad_norm_ after an exception"):
            engine.clip_grad_norm_(1.0)
        engine.zero_grad()
        engine.clip_grad_norm_(1.0)


def test_the_norm_of_nothing_lies_on_the_engines_device() -> None:
    """Its sum over the ranks would fail elsewhere."""
    with engine_of(Net()) as engine, torch.device("meta"):
        assert engine.clip_grad_norm_(1.0).device == engine.device


@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_clipping_multiplies_the_gradients(accumulate: str) -> None:
    precision = {"params": "bfloat16", "reduce": accumulate, "accumulate": accumulate}
    with engine_of(Net(), precision=precision) as engine:
        engine.backward(loss_of(engine))
        before = engine.gradients()
        norm = engine.clip_grad_norm_(1e-3)
        assert norm > 1e-3
        coefficient = clip_coefficient(norm, 1e-3)
        for name, clipped in engine.gradients().items():
            assert torch.equal(clipped, before[name] * coefficient)  # in float32, whatever they are reduced in
        engine.step()


def test_a_loss_function_that_fails_is_a_failure_of_the_engine() -> None:
    def fails(*_: object) -> Tensor:
        raise ValueError("no loss")

    with engine_of(Net()) as engine:
        with pytest.raises(ValueError, match="no loss"):
            engine.train_step(torch.ones(2, 8), fails)
        with pytest.raises(EngineError, match="zero_grad"):
            engine.train_step(torch.ones(2, 8), lambda output, _: output.sum())
        engine.zero_grad()
        engine.train_step(torch.ones(2, 8), lambda output, _: output.sum())


# ---------------------------------------------------------------------- after destroy()
@slow("Net-aot_eager-1")
@STAGES
@MODES
@pytest.mark.parametrize("build", [Net, Biases, Regions])
def test_a_backward_of_a_loss_made_before_destroy(stage: int, mode: str, build: type[nn.Module]) -> None:
    """It would leave no gradients anywhere."""
    engine = engine_of(build(), stage, mode)
    engine.backward(loss_of(engine))
    engine.step()
    late = loss_of(engine)
    engine.destroy()
    for _ in range(2):
        with pytest.raises(EngineError, match="destroy"):
            late.backward(retain_graph=True)
    with pytest.raises(EngineError, match="destroy"):
        engine.backward(late)
    model = engine.module
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()

    del late
    with engine_of(model, stage, mode) as second:
        second.backward(loss_of(second))
        second.step()


def test_a_second_engine_for_one_model() -> None:
    with engine_of(Net()) as engine:
        with pytest.raises(ParameterError) as caught:
            engine_of(engine.module)
    assert str(caught.value).splitlines()[1:] == [
        "  the model: has an engine already; use it, or call its destroy() first"
    ]


# ---------------------------------------------------------------------- dropped
def dropped(**settings: Any) -> list[weakref.ref[Any]]:
    """Trains with an engine and forgets it without `destroy`."""
    engine = engine_of(Net(), **settings)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    shards = [bucket.shard for bucket in engine._runtime.buckets.values()]
    return [weakref.ref(thing) for thing in (engine, engine.module, engine.optimizer, *shards)]


@MODES
@pytest.mark.parametrize(("stage", "gather"), [(1, False), (2, True), (3, False)])
def test_a_dropped_engine_is_garbage_with_its_model(stage: int, gather: bool, mode: str) -> None:
    references = dropped(stage=stage, gather_after_step=gather, mode=mode)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_loss_keeps_its_engine() -> None:
    loss = loss_of(engine_of(Net()))
    gc.collect()
    loss.backward()


def drop_and_go_on(stage: int) -> tuple[bool, list[str], float]:
    references = dropped(stage=stage)
    gc.collect()
    watchers = [thread.name for thread in threading.enumerate() if "alarm" in thread.name]
    with engine_of(Net(), stage) as engine:
        engine.backward(loss_of(engine))
        engine.step()
        weight = engine.state_dict().get("enter.weight", torch.zeros(1))
    dist.barrier()
    return all(reference() is None for reference in references), watchers, float(weight.sum())


@pytest.mark.matrix
def test_a_dropped_engine_of_several_ranks_leaves_its_alarm(disposable: Pools) -> None:
    """The others must still learn how its process ends; the ranks can make another engine meanwhile."""
    for gone, watchers, _ in disposable(2).run(drop_and_go_on, 3):
        assert gone
        assert watchers == ["zeroweave alarm"]


# ---------------------------------------------------------------------- buffers
def with_buffer(make: Callable[[], Tensor]) -> nn.Module:
    module = Net()
    module.register_buffer("extra", make())
    return module


DTYPES = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64)


def share_buffers() -> list[bool]:
    equal = []
    for dtype in DTYPES:
        mine = torch.full((2, 3), 1.0 - dist.get_rank()).to(dtype)
        with engine_of(with_buffer(lambda value=mine: value.clone().t())) as engine:  # type: ignore[misc]
            equal.append(torch.equal(engine.module.extra.float(), torch.ones(3, 2)))
    return equal


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_buffers_of_every_dtype_are_rank_0s(pools: Pools) -> None:
    assert pools(2).run(share_buffers) == [[True] * len(DTYPES)] * 2


def other_buffers() -> None:
    engine_of(with_buffer(lambda: torch.zeros(2 + dist.get_rank())))


def test_other_buffers_on_some_ranks(pools: Pools) -> None:
    for outcome in pools(2).outcomes(other_buffers):
        assert outcome.kind == "EngineError" and "buffer 'extra'" in outcome.message, outcome.describe()
