"""What a coalesced block refuses, and what is left after a refusal or an exception: a clean state, nobody waiting."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroweave as zw
from tests.distributed.engine.coalescing import Setting, initialize
from tests.distributed.ranks.test_failures import TrippingStack, assert_ended_by, trip
from tests.support.harness import Pool, Pools
from tests.support.marks import slow
from tests.support.reference import CHECKED, Plain, build, draw, judge, set_lr, train_reference
from tests.support.zoo import Entry, regression, rows

PATHS = [(1, "eager"), (2, "aot_eager"), (3, "aot_eager"), (3, "eager")]
ALL_PATHS = [(stage, mode) for stage in (1, 2, 3) for mode in ("eager", "aot_eager")]
MODEL = Entry("tripping", TrippingStack, rows, regression)
N = 2


def marked(rows: list[tuple[Any, ...]], daily: list[tuple[Any, ...]]) -> list[Any]:
    return [each if each in daily else pytest.param(*each, marks=pytest.mark.matrix) for each in rows]


def backward(engine: Any, index: int) -> None:
    draw(engine.rank, index)
    x, y = rows(engine.rank, index)
    engine.backward(F.mse_loss(engine(x), y) / N)


def clean_step(engine: Any, expected: Any, step: int) -> tuple[float, str]:
    """A coalesced window of ordinary length; the difference of its gradients."""
    with engine.coalesce_grad_reduction():
        for index in range(step * N, (step + 1) * N):
            backward(engine, index)
    difference = judge(engine.gradients(), expected.gradients[step])
    engine.step()
    return difference


@contextlib.contextmanager
def entered(*blocks: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


INSIDE: dict[str, Callable[[Any], Any]] = {
    "step": lambda engine: engine.step(),
    "coalesce_grad_reduction": lambda engine: entered(engine.coalesce_grad_reduction()).__enter__(),
    "no_sync": lambda engine: entered(engine.no_sync()).__enter__(),
    "gradients": lambda engine: engine.gradients(),
    "clip_grad_norm_": lambda engine: engine.clip_grad_norm_(1.0),
    "profiling": lambda engine: entered(engine.profiling()).__enter__(),
    "destroy": lambda engine: engine.destroy(),
}


def misuse_inside(stage: int, mode: str) -> list[tuple[float, str]]:
    """Each misuse is refused in the middle of a block, which then goes on as if nothing had been tried."""
    expected = train_reference(MODEL, N, steps=CHECKED)
    differences = []
    with initialize(build(MODEL), Setting(stage, mode).config()) as engine:
        for step in range(CHECKED):
            with engine.coalesce_grad_reduction():
                for index in range(step * N, (step + 1) * N):
                    backward(engine, index)
                    for name, misuse in INSIDE.items():
                        with pytest.raises(
                            RuntimeError, match=rf"^\[ZW\d+\] {name}\(\) inside .*coalesce_grad_reduction"
                        ):
                            misuse(engine)
            differences.append(judge(engine.gradients(), expected.gradients[step]))
            engine.step()
            assert engine.global_steps == step + 1
    return differences


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "mode"), marked(ALL_PATHS, PATHS))
def test_a_misuse_inside_is_refused_and_changes_nothing(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(misuse_inside, stage, mode):
        assert max(differences)[0] <= 1, differences


def misuse_leaves(stage: int, mode: str) -> list[tuple[float, str]]:
    """A refusal that nobody catches inside ends the block: nothing is reduced, and the next window is a clean one."""
    expected = train_reference(MODEL, N, steps=CHECKED)
    differences = []
    with initialize(build(MODEL), Setting(stage, mode).config()) as engine:
        for step, (name, misuse) in enumerate([*INSIDE.items()][:CHECKED]):
            with (
                pytest.raises(zw.EngineError, match=rf"^\[ZW\d+\] {name}\(\) inside"),
                engine.coalesce_grad_reduction(),
            ):
                if step == 1:
                    backward(engine, 77)
                misuse(engine)
            if step == 1:
                engine.zero_grad()
            with (
                engine.no_sync(),
                pytest.raises(RuntimeError, match=r"^\[ZW\d+\] coalesce_grad_reduction\(\) inside .*no_sync"),
            ):
                engine.coalesce_grad_reduction().__enter__()
            differences.append(clean_step(engine, expected, step))
    return differences


@slow("2-aot_eager", "3-aot_eager")
@pytest.mark.parametrize(("stage", "mode"), marked(ALL_PATHS, PATHS))
def test_a_misuse_that_leaves_the_block(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(misuse_leaves, stage, mode):
        assert max(differences)[0] <= 1, differences


class Attempting(TrippingStack):
    """Tries something in its forward, or in the backward of that."""

    attempt: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attempt = self.attempt
        if attempt is not None and self.place == "a forward":
            attempt()
        x = super().forward(x)
        if attempt is not None and self.place == "a backward":
            x.register_hook(lambda gradient: attempt())
        return x


ATTEMPTING = Entry("attempting", Attempting, rows, regression)


def misuse_in_the_middle(stage: int, mode: str) -> list[tuple[float, str]]:
    """A block that begins, or a step, inside a forward or backward: refused, and the window goes on."""
    expected = train_reference(ATTEMPTING, N, steps=CHECKED)
    differences, tried = [], []
    with initialize(build(ATTEMPTING), Setting(stage, mode).config()) as engine:

        def attempt() -> None:
            for misuse in ("coalesce_grad_reduction", "step"):
                with pytest.raises(RuntimeError, match=rf"^\[ZW\d+\] {misuse}\(\) inside a forward or backward"):
                    engine.coalesce_grad_reduction().__enter__() if "reduction" in misuse else engine.step()
                tried.append(misuse)

        for step, place in enumerate(("a forward", "a backward", "")):
            engine.module.place, engine.module.attempt = place, attempt if place else None
            for index in range(step * N, (step + 1) * N):
                engine.set_gradient_accumulation_boundary(index == (step + 1) * N - 1)
                backward(engine, index)
            differences.append(judge(engine.gradients(), expected.gradients[step]))
            engine.step()
        assert len(tried) == 2 * 2 * N and engine.global_steps == CHECKED
    return differences


@slow("2-aot_eager", "3-aot_eager")
@pytest.mark.parametrize(("stage", "mode"), marked(ALL_PATHS, [(1, "eager"), (2, "aot_eager"), (3, "aot_eager")]))
def test_a_misuse_inside_a_forward_or_backward(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(misuse_in_the_middle, stage, mode):
        assert max(differences)[0] <= 1, differences


def boundaries(stage: int, mode: str) -> None:
    """What was said of the boundary before a block holds after it; where nothing was, the step ends the window."""
    config = Setting(stage, mode).config(gradient_accumulation_steps=3)
    with initialize(build(MODEL), config) as engine:
        set_lr(engine.optimizer, CHECKED, 0.1)
        for said in (None, False, True):
            engine.set_gradient_accumulation_boundary(said)
            before = engine.global_steps
            with engine.coalesce_grad_reduction():
                assert engine.is_gradient_accumulation_boundary() == bool(said)
                for index in range(N):
                    engine.set_gradient_accumulation_boundary(index == N - 1)
                    backward(engine, index)
            assert engine.is_gradient_accumulation_boundary() == (said is not False)
            engine.step()
            assert engine.was_step_applied() == (said is not False)
            assert engine.global_steps == before + (said is not False)
        engine.set_gradient_accumulation_boundary(None)
        assert not engine.is_gradient_accumulation_boundary()  # counted again, from the start


@pytest.mark.parametrize(("stage", "mode"), marked(ALL_PATHS, [(2, "eager")]))
def test_the_boundary_set_before_is_the_one_after(pools: Pools, stage: int, mode: str) -> None:
    pools(2).run(boundaries, stage, mode)


PLACES = ("forward", "backward", "the block")


def on_all_ranks(stage: int, mode: str) -> list[tuple[float, str]]:
    """An exception in the last backward of a block, or beside it, on all ranks; then `zero_grad()` and the window."""
    expected = train_reference(MODEL, N, steps=CHECKED)
    differences = []
    with initialize(build(MODEL), Setting(stage, mode).config()) as engine:
        for step, place in enumerate(PLACES):
            engine.set_gradient_accumulation_boundary(False)
            with pytest.raises(ValueError, match="no more batteries"), engine.coalesce_grad_reduction():
                backward(engine, 100)
                engine.set_gradient_accumulation_boundary(True)
                engine.module.place = place
                if place == "the block":
                    raise ValueError("no more batteries")
                backward(engine, 101)
            engine.module.place = ""
            assert not engine.is_gradient_accumulation_boundary()
            engine.set_gradient_accumulation_boundary(None)
            for refused in (engine.step, lambda: backward(engine, 102), engine.coalesce_grad_reduction().__enter__):
                with pytest.raises(zw.EngineError, match=r"zero_grad\(\) first"):
                    refused()
            engine.zero_grad()
            differences.append(clean_step(engine, expected, step))
    return differences


@slow("2-aot_eager", "3-aot_eager", "3-eager")
@pytest.mark.parametrize(("stage", "mode"), marked(ALL_PATHS, PATHS))
def test_an_exception_on_all_ranks(pools: Pools, stage: int, mode: str) -> None:
    for differences in pools(2).run(on_all_ranks, stage, mode):
        assert max(differences)[0] <= 1, differences


def on_one_rank(place: str, stage: int, mode: str, failing: int) -> int:
    torch.manual_seed(0)
    module = TrippingStack()
    with initialize(module, Setting(stage, mode).config()) as engine:
        for step in range(20):
            with engine.coalesce_grad_reduction():
                backward(engine, step)
                if step == 2 and dist.get_rank() == failing:
                    module.place = place
                    if place == "the block":
                        trip()
                backward(engine, step)
            engine.step()
        return int(engine.global_steps)


ONE_RANK = [(place, stage, mode, 1) for place in PLACES for stage, mode in ALL_PATHS]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("place", "stage", "mode", "failing"),
    marked(ONE_RANK, [("the block", 2, "eager", 1), ("backward", 3, "aot_eager", 1)]),
)
def test_an_exception_on_one_rank(
    disposable: Callable[[int], Pool], place: str, stage: int, mode: str, failing: int
) -> None:
    assert_ended_by(disposable(2).outcomes(on_one_rank, place, stage, mode, failing), failing)


class PipelineModule(nn.Sequential):
    """A class of that name, as pipeline libraries have it."""


class Hiding(torch.optim.Optimizer):
    """An optimizer whose groups do not show what it trains."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.param_groups[0]["params"] = []

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Wrapper:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def refused(module: nn.Module, optimizer: Any, stage: int) -> str:
    with pytest.raises(NotImplementedError) as caught:
        with zw.initialize(module, optimizer, {"stage": stage, "compile": {"enabled": False}}) as engine:
            with engine.coalesce_grad_reduction():
                pass
    assert isinstance(caught.value, zw.UnsupportedError)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_refused_pipeline_trains_on(stage: int) -> None:
    module, x = PipelineModule(nn.Linear(2, 2)), torch.randn(3, 2)
    plain = Plain(copy.deepcopy(module), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    ours = torch.optim.SGD(module.parameters(), lr=0.1)
    with zw.initialize(module, ours, {"stage": stage, "compile": {"enabled": False}}) as engine:
        for _ in range(3):
            with pytest.raises(NotImplementedError), engine.coalesce_grad_reduction():
                pass
            engine.train_step(x, lambda y, _: y.square().mean())
            plain.each(lambda net, x: net(x).square().mean().backward(), x)
            plain.step()
        assert engine.global_steps == 3 and engine.stats.departures == 0
    found = judge(dict(module.named_parameters()), plain.values())
    assert found[0] <= 1, found


def test_evaluation_coalesces_nothing() -> None:
    with zw.initialize(nn.Linear(2, 2), None, {"compile": {"enabled": False}}) as engine:
        with pytest.raises(zw.EngineError, match="needs an optimizer"), engine.coalesce_grad_reduction():
            pass
        engine(torch.ones(1, 2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_cannot_be_coalesced(stage: int) -> None:
    if stage == 0:
        assert "stage must be 1, 2 or 3, not 0" in refused(nn.Linear(2, 2), None, 0)
        return
    sgd = torch.optim.SGD
    pipeline = PipelineModule(nn.Linear(2, 2))
    assert "a pipeline module (PipelineModule)" in refused(pipeline, sgd(pipeline.parameters()), stage)
    module = nn.Linear(2, 2)
    assert "hides its parameters" in refused(module, zw.element_wise(Hiding(sgd(module.parameters()))), stage)
    module = nn.Linear(2, 2)
    assert "hides its parameters" in refused(module, Wrapper(sgd(module.parameters())), stage)
