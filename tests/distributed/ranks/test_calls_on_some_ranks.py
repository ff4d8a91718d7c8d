"""Collective calls that only some ranks make: every rank ends, and is told which call it was and who made it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroweave as zw
from tests.support.harness import Outcome, Pool, Pools
from tests.support.marks import MODES, daily
from tests.support.patience import patient
from tests.support.zoo import Block, Stack, rows

Disposable = Callable[[int], Pool]
DEADLINE = 8.0
SHORT = 4.0


def engine_of(stage: int, deadline: float) -> Any:
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    config = {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": deadline}
    return zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.05), config)


def forward(engine: Any, index: int) -> torch.Tensor:
    x, y = rows(engine.rank, index)
    return F.mse_loss(engine(x), y)


def odd(what: str, engine: Any) -> None:
    name = next(iter(dict(engine.module.named_parameters())))
    if what == "state_dict":
        engine.state_dict()
    elif what == "full_parameters":
        with engine.full_parameters():
            pass
    elif what == "full":
        engine.full(name)
    elif what == "load_state_dict":
        engine.load_state_dict({})
    elif what == "gradients":
        engine.gradients()
    elif what == "clip_grad_norm_":
        engine.clip_grad_norm_(1.0)
    elif what == "forward":
        forward(engine, 0)


def one_rank_alone(what: str, stage: int, alone: int, behind_the_backward: bool) -> int:
    """In step 2 one rank makes a call that the others do not make (or leaves out `step`)."""
    with engine_of(stage, DEADLINE) as engine:
        for index in range(6):
            mine = index == 2 and engine.rank == alone
            if index == 2:
                print(f"odd at {time.time():.3f}", file=sys.stderr, flush=True)
            if mine and not behind_the_backward:
                odd(what, engine)
            engine.backward(forward(engine, index))
            if mine and behind_the_backward:
                odd(what, engine)
            if not (mine and what == "step"):
                engine.step()
        return int(engine.global_steps)


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.kind} {o.message} {o.stderr}" for o in outcomes)


ALONE = [
    ("state_dict", 3, 0, False),
    pytest.param("state_dict", 2, 0, False, marks=pytest.mark.matrix),
    pytest.param("full_parameters", 3, 1, False, marks=pytest.mark.matrix),
    pytest.param("full", 3, 0, False, marks=pytest.mark.matrix),
    pytest.param("load_state_dict", 3, 0, False, marks=pytest.mark.matrix),
    pytest.param("gradients", 3, 0, True, marks=pytest.mark.matrix),
    pytest.param("gradients", 1, 1, True, marks=pytest.mark.matrix),
    pytest.param("clip_grad_norm_", 3, 0, True, marks=pytest.mark.matrix),
    pytest.param("forward", 3, 1, True, marks=pytest.mark.matrix),
    pytest.param("step", 3, 1, True, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("what", "stage", "alone", "behind"), ALONE)
def test_a_call_that_one_rank_makes(disposable: Disposable, what: str, stage: int, alone: int, behind: bool) -> None:
    outcomes = disposable(2).outcomes(one_rank_alone, what, stage, alone, behind, deadline=120.0)
    text = told(outcomes)
    for outcome in outcomes:
        assert outcome.failed, f"rank {outcome.rank} trained on: {outcome.value} steps"
    assert re.search(rf"\b{what}\b", text) and f"rank {alone}" in text, text
    assert "Exception raised from" not in text, "frames of C++"


@pytest.mark.matrix
def test_a_call_that_one_of_three_ranks_makes(disposable: Disposable) -> None:
    outcomes = disposable(3).outcomes(one_rank_alone, "state_dict", 3, 1, False, deadline=120.0)
    assert all(outcome.failed for outcome in outcomes)
    assert re.search("rank 1 was in state_dict|rank 1 (is )?at 'state_dict'", told(outcomes)), told(outcomes)


def stuck(where: str, stage: int, late: int) -> int:
    """In step 2 one rank is stuck outside the engine, as in a data loader."""
    with engine_of(stage, SHORT) as engine:
        for index in range(4):
            if index == 2 and engine.rank == late:
                if where == "backward":
                    loss = forward(engine, index)
                print(f"stuck at {time.time():.3f}", file=sys.stderr, flush=True)
                time.sleep(300)
            loss = forward(engine, index)
            if index == 2 and where == "state_dict":
                engine.state_dict()
            engine.backward(loss)
            engine.step()
        return int(engine.global_steps)


STUCK = [
    ("forward", 3, 1),
    pytest.param("forward", 2, 0, marks=pytest.mark.matrix),
    pytest.param("backward", 1, 1, marks=pytest.mark.matrix),
    pytest.param("backward", 3, 0, marks=pytest.mark.matrix),
    pytest.param("state_dict", 2, 1, marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("where", "stage", "late"), STUCK)
def test_the_deadline_holds_in_every_collective(disposable: Disposable, where: str, stage: int, late: int) -> None:
    outcomes = disposable(2).outcomes(stuck, where, stage, late, deadline=120.0)
    text = told(outcomes)
    began = float(re.findall(r"stuck at ([\d.]+)", text)[0])
    for outcome in outcomes:
        assert outcome.failed, outcome.describe()
        assert outcome.ended - began < SHORT + patient(5.0), f"rank {outcome.rank} after {outcome.ended - began:.1f} s"
    assert re.search(rf"rank {late} \(.*\) did not .* within the deadline", text), text
    assert re.search(r"collective \d+\b.*(all_gather|reduce_scatter|all_reduce) ", text), text


def evaluates_alone(stage: int, alone: int, how: str) -> int:
    """Behind step 2 one rank makes a forward, by the engine or by a module; the other leaves the engine alone."""
    with engine_of(stage, SHORT) as engine:
        for index in range(4):
            if index == 2 and engine.rank == alone:
                with torch.no_grad():
                    x, _ = rows(engine.rank, index)
                    engine(x) if how == "engine" else engine.module(x)
            elif index == 2:
                time.sleep(300)
            engine.backward(forward(engine, index))
            engine.step()
        return int(engine.global_steps)


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "alone", "how"), [(2, 0, "engine"), (1, 1, "engine"), (2, 0, "module")])
def test_an_evaluation_on_one_rank_says_what_it_waits_for(
    disposable: Disposable, stage: int, alone: int, how: str
) -> None:
    outcomes = disposable(2).outcomes(evaluates_alone, stage, alone, how, deadline=120.0)
    text = told(outcomes)
    assert all(outcome.failed for outcome in outcomes), text
    assert re.search(rf"rank {1 - alone} \(.*\) did not come to collective", text), text
    where = "in forward" if how == "engine" else "after step, in a module that was called by itself"
    assert f"rank {alone} waits for it {where}: at stages 1 and 2 the first forward behind a step() gathers" in text
    assert "make it on all ranks" in text and "full_parameters()" in text and "gather_after_step" in text


def evaluates_alone_with_gathered_weights(stage: int, mode: str, frozen: bool) -> tuple[list[float], list[float]]:
    """What one rank's forwards behind each step give, on either rank in turn, and what all ranks have together."""
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    if frozen:
        next(module.children()).requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 60.0, "gather_after_step": True}
    alone, together = [], []
    with zw.initialize(module, torch.optim.SGD(trained, lr=0.05), config) as engine:
        for index in range(5):
            x, _ = rows(0, 100)
            with torch.no_grad():
                if engine.rank == index % 2:
                    alone += [float(engine(x).sum()), float(engine.module(x).sum())]
                dist.barrier()  # as a program may do that has one rank evaluate
                expected = float(engine(x).sum())
                together += [expected] * 2 if engine.rank == index % 2 else []
            engine.backward(forward(engine, index))
            engine.step()
        assert engine.stats.departures == 0
    return alone, together


@daily(("stage", "mode", "frozen"), [(2, "eager", True)], [(1, "eager", False), (2, "aot_eager", False)])
def test_with_gathered_weights_one_rank_evaluates_alone(pools: Pools, stage: int, mode: str, frozen: bool) -> None:
    for alone, together in pools(2).run(evaluates_alone_with_gathered_weights, stage, mode, frozen):
        assert len(alone) >= 4
        for one, all_of_them in zip(alone, together, strict=True):
            assert one == pytest.approx(all_of_them, rel=1e-5 if mode != "eager" else 0.0)


def slow(seconds: float, ranks: tuple[int, ...]) -> int:
    """Ranks take long outside the engine, between a forward and its backward, and before the step."""
    with engine_of(3, DEADLINE) as engine:
        for index in range(4):
            if engine.rank in ranks and index == 1:
                time.sleep(seconds)
            loss = forward(engine, index)
            if engine.rank in ranks and index == 2:
                time.sleep(seconds)
            engine.backward(loss)
            if engine.rank in ranks and index == 3:
                time.sleep(seconds)
            engine.step()
        return int(engine.global_steps)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("seconds", "ranks"), [(DEADLINE - 3.0, (1,)), (DEADLINE - 3.0, (0,)), (DEADLINE + 8.0, (0, 1))]
)
def test_slow_ranks_are_not_ended(disposable: Disposable, seconds: float, ranks: tuple[int, ...]) -> None:
    """One rank nearly as long as the deadline; all of them for longer, when none waits for another."""
    outcomes = disposable(2).outcomes(slow, seconds, ranks, deadline=240.0)
    assert [outcome.value for outcome in outcomes] == [4, 4], told(outcomes)
