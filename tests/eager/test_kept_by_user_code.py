"""Parameters that user code keeps beyond their time: readable while they are right, refused by name afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroweave as zw
from tests.support.marks import STAGES
from tests.support.reference import Expected, Plain, judge
from zeroweave.errors import ParameterError

pytestmark = [pytest.mark.oldest, pytest.mark.usefixtures("flats_apart")]

WIDTH, STEPS, RATE = 8, 3, 0.1
NAME = "blocks.1.weight"


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight, gradient.t() @ ctx.x


def on_context(x: Tensor, weight: Tensor) -> Tensor:
    return KeepsOnContext.apply(x, weight)  # type: ignore[no-any-return]


def in_saved_tensors(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return (x.unsqueeze(1) * weight).sum(-1)  # saves the parameter, not a view of it


def in_a_closure(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(lambda x: F.linear(x, weight), x, use_reentrant=False)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block whose weight is kept: by the graph through `use`, and in `stash`, if it is one."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], stash: list[Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.use, self.stash = use, stash

    def forward(self, x: Tensor) -> Tensor:
        if self.stash is not None:
            self.stash.append(self.weight)
        return torch.tanh(self.use(x, self.weight))


class Model(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor] = F.linear, stash: list[Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(use), Block(use, stash), Block(use)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def start(model: nn.Module, stage: int, **settings: Any) -> Any:
    """An engine with a bucket for each block."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    defaults = {"compile": {"enabled": False}, "bucket": {"bytes": 1}}
    return zw.initialize(model, optimizer, {"stage": stage, **defaults, **settings})


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module) -> Iterator[Expected]:
    """Plain training: the values after each step."""
    plain = Plain(model, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    for step in range(STEPS):
        plain.each(lambda net, x: net(x).pow(2).mean().backward(), batch(step))
        plain.step()
        yield plain.values()


def assert_equal(found: dict[str, Tensor], expected: Expected) -> None:
    assert found.keys() == expected.exact.keys()
    used = judge(found, expected)
    assert used[0] <= 1, used


def gathered(engine: Any) -> int:
    return sum(bucket.resident for bucket in engine._runtime.buckets.values())


def lingering(engine: Any) -> int:
    return sum(bucket.resident and bucket.holds == 0 for bucket in engine._runtime.buckets.values())


@STAGES
@pytest.mark.parametrize("use", [on_context, in_saved_tensors, in_a_closure])
def test_a_graph_that_keeps_parameters_trains(use: Callable[[Tensor, Tensor], Tensor], stage: int) -> None:
    """The losses live on, and with them, after their backward, what a context has kept."""
    model, losses = Model(use), []
    expected = steps(copy.deepcopy(model))
    with start(model, stage) as engine:
        for step in range(STEPS):
            losses.append(engine(batch(step)).pow(2).mean())
            engine.backward(losses[-1])
            engine.step()
            assert gathered(engine) == 0
            assert_equal(engine.state_dict(), next(expected))


@STAGES
def test_a_kept_parameter_is_readable_until_its_values_change(stage: int) -> None:
    stash: list[Tensor] = []
    model = Model(stash=stash)
    plain = copy.deepcopy(model)
    before, expected = Expected.alone({NAME: plain.get_parameter(NAME).detach().clone()}), steps(plain)
    with start(model, stage) as engine:
        for step in range(STEPS):
            loss = engine(batch(step)).pow(2).mean()
            assert_equal({NAME: stash[-1].detach()}, before)
            engine.backward(loss)
            assert_equal({NAME: stash[-1].detach()}, before)
            engine.step()
            before = next(expected)[NAME]
            for parameter in stash:
                for touch in (torch.sum, Tensor.tolist, Tensor.zero_, Tensor.t):
                    with pytest.raises(ParameterError, match=NAME):
                        touch(parameter)
                assert isinstance(parameter, nn.Parameter) and parameter.shape == (WIDTH, WIDTH)
            assert gathered(engine) == 0
            assert_equal({NAME: engine.state_dict()[NAME]}, before)


@STAGES
def test_a_parameter_kept_by_inference_is_refused_once_others_are_loaded(stage: int) -> None:
    stash: list[Tensor] = []
    with start(Model(stash=stash), stage) as engine:
        state = engine.state_dict()
        with torch.no_grad():
            engine(batch(0))
        assert torch.equal(stash[0].detach(), state[NAME])
        engine.load_state_dict({name: value + 1 for name, value in state.items()})
        with pytest.raises(ParameterError, match=NAME):
            stash[0].sum()
        with torch.no_grad():
            engine(batch(0))
        assert torch.equal(stash[1].detach(), state[NAME] + 1)


def test_what_is_dropped_is_freed() -> None:
    """A kept parameter keeps its bucket only, and only as long as it is kept."""
    stash: list[Tensor] = []
    model = Model(stash=stash)
    with start(model, 3) as engine, torch.no_grad():
        engine(batch(0))
        assert gathered(engine) == lingering(engine) == 1
        stash.clear()
        model.blocks[1].stash = None
        engine(batch(0))
        assert gathered(engine) == 0


@STAGES
@pytest.mark.parametrize("lower", [None, "aot_eager"])
def test_nothing_lingers_where_nothing_is_kept(stage: int, lower: str | None) -> None:
    settings = {"enabled": lower is not None, **({"lower": lower} if lower else {})}
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)])
    with start(model, stage, compile=settings) as engine:
        for step in range(STEPS):
            loss = engine(batch(step)).pow(2).mean()
            assert lingering(engine) == 0
            engine.backward(loss)
            assert lingering(engine) == 0
            engine.step()
            assert gathered(engine) == 0
            with torch.no_grad():
                engine(batch(step))
            assert lingering(engine) == 0


TOUCHES: dict[str, Callable[[Any], object]] = {
    "sum": torch.sum,
    "tolist": Tensor.tolist,
    "view": Tensor.t,
    "copy_": lambda p: p.data.copy_(torch.zeros(WIDTH, WIDTH)),
    "zero_": Tensor.zero_,
    "setitem": lambda p: p.__setitem__(0, 1.0),
}


@STAGES
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_view_kept_from_full_parameters_is_refused(stage: int, touch: str) -> None:
    with start(Model(), stage) as engine:
        with engine.full_parameters() as full:
            kept = full[NAME]
            kept.data.fill_(0.5)
        with pytest.raises(ParameterError, match=NAME):
            TOUCHES[touch](kept)
        assert isinstance(kept, nn.Parameter) and kept.shape == (WIDTH, WIDTH) and kept.requires_grad
        assert gathered(engine) == 0
        engine.backward(engine(batch(0)).pow(2).mean())
        engine.step()
        with engine.full_parameters() as again, pytest.raises(ParameterError, match=NAME):
            assert again[NAME] is not kept
            TOUCHES[touch](kept)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_view_kept_from_an_earlier_step_is_refused(stage: int) -> None:
    with start(Model(), stage, gather_after_step=True) as engine:
        kept = dict(engine.module.named_parameters())
        for step in range(STEPS):
            assert all(torch.isfinite(p).all() for p in kept.values())
            engine.backward(engine(batch(step)).pow(2).mean())
            engine.step()
            for name, parameter in kept.items():
                with pytest.raises(ParameterError, match=name):
                    parameter.norm()
            kept = dict(engine.module.named_parameters())


def penalised(net: nn.Module, x: Tensor, penalty: str) -> Tensor:
    return net(x).float().pow(2).mean() + sum(PENALTIES[penalty](p) for p in net.parameters()) * 0.01


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "saves it": lambda p: p.pow(2).sum(),
    "saves nothing": lambda p: (p * 3).sum(),
}


@STAGES
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_term_that_reads_views_keeps_its_gradient(stage: int, penalty: str, autocast: bool) -> None:
    """The objects refuse, the graph goes on with the values that it read."""
    model = Model()
    plain = Plain(copy.deepcopy(model), lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), start(model, stage) as engine:
        for step in range(STEPS):
            with engine.full_parameters() as full:
                kept = list(full.values())
                term = sum(PENALTIES[penalty](p) for p in kept)
                torch.mm(torch.ones(1, WIDTH), kept[0])  # for the cache of autocast, which refers to it weakly
            for parameter in kept:
                with pytest.raises(ParameterError, match="blocks"):
                    parameter.sum()
            loss = engine(batch(step)).float().pow(2).mean() + 0.01 * term
            engine.backward(loss)
            plain.each(lambda net, x: penalised(net, x, penalty).backward(), batch(step))
            engine.step()
            plain.step()
            if autocast:  # plain training keeps its old casts while autocast is open
                torch.clear_autocast_cache()
            expected = plain.values()
            assert_equal(engine.state_dict(), Expected.alone(expected.plain) if autocast else expected)
