"""Replayed steps are exact, and leave the engine as steps that ran: by graphs on the CPU, in a world of one."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import zeroweave as zw
from tests.support.graphs import Tape, on_cpu
from tests.support.marks import daily, slow
from tests.support.replays import WIDTH, Case, batch_of, compared, loss_fn, micro_step, start, started, train
from zeroweave.engine.logs.sinks import FILE

CASES = [
    *(Case(stage, gas, loop, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 4) for loop in ("train_step", "plain")),
    *(Case(stage, 2, "clipped", decay=True) for stage in (2, 3)),
    *(Case(3, gas, loop, overflow=20, clipping=0.1, decay=True) for gas in (1, 3) for loop in ("train_step", "plain")),
    Case(2, sizes=(4, 6)),
    Case(2, 2, config={"precision": {"accumulate": "bfloat16"}, "reduce": {"depth": 1}}),
]
FROZEN = [
    *(Case(stage, gas, loop, frozen=True) for gas, loop in ((1, "train_step"), (3, "plain")) for stage in (2, 1)),
    Case(3, frozen=True),
]
DEFERRING = [
    *(Case(stage, 4, loop, dropout=0.1) for loop in ("coalesced", "no_sync") for stage in (3, 2, 1)),
    *(
        Case(stage, 4, loop, overflow=20, clipping=0.1, sizes=(4, 6))
        for loop in ("coalesced", "no_sync")
        for stage in (1, 3)
    ),
]


@daily("case", CASES[1::16], [case for case in CASES if case not in CASES[1::16]], ids=str)
def test_replayed_steps_are_exact(case: Case) -> None:
    differs, graphed = compared(case)
    assert not differs
    assert graphed["captured"] == len(case.sizes) and not graphed["told"]
    assert graphed["replayed"] >= case.gas * (case.steps - 7 - 5 * len(case.sizes)), graphed["uncaptured"]


@daily("case", [], DEFERRING, ids=str)
def test_replayed_windows_whose_backwards_defer_are_exact(case: Case) -> None:
    differs, graphed = compared(case)
    assert not differs
    assert graphed["captured"] == len(case.sizes) and not graphed["told"]
    assert graphed["replayed"] >= case.steps - 7 - 5 * len(case.sizes), graphed["uncaptured"]


@slow("3-3")
@daily(("stage", "gas"), [(3, 3)], [(1, 1), (1, 3), (2, 1), (2, 3), (3, 1)])
def test_whatever_else_a_program_does_is_exact(stage: int, gas: int) -> None:
    case = Case(stage, gas, "busy", steps=64, dropout=0.1)
    differs, graphed = compared(case)
    assert not differs
    assert graphed["captured"] >= 3 and graphed["replayed"] >= 8 * gas, (graphed["uncaptured"], graphed["told"])


@pytest.mark.parametrize("loop", ["train_step", "plain"])
def test_a_log_of_each_step_disturbs_no_graph(loop: str, tmp_path: Path) -> None:
    config = {"log_dir": str(tmp_path), "log": {"every": 1}}
    case = Case(3, 2, loop, steps=16, clipping=0.1, overflow=10, config=config)
    differs, graphed = compared(case)
    assert not differs and not graphed["told"]
    assert graphed["captured"] == 1 and graphed["replayed"] >= 2 * (case.steps - 12), graphed["uncaptured"]
    told = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    runs = [index for index, each in enumerate(told) if each["kind"] == "run"]
    one, other = told[: runs[1]], told[runs[1] :]
    kept = "step", "loss", "loss_scale", "gradient_norm", "skipped"
    figures = [[[each[name] for name in kept] for each in run if each["kind"] == "figures"] for run in (one, other)]
    assert figures[0] == figures[1] and [each[0] for each in figures[0]] == list(range(1, case.steps + 1))
    assert [each["step"] for each in other if each.get("event") == "skipped"] == [11]


@daily("case", FROZEN[:1], FROZEN[1:], ids=str)
def test_frozen_weights_lie_where_graphs_find_them(case: Case) -> None:
    """Gathered before the capture and never inside; where they are written, the next windows run as ever."""
    losses, replayed = [], []
    for graphs in (True, False):
        with on_cpu() as device:
            engine = start(case, graphs)
            device.serve(engine)
            engine.reschedule(keep="all" if case.stage == 3 else "none")
            found = []
            for index in range(28):
                before = engine.stats.replayed_steps
                if index in (12, 20):
                    engine.set_full("blocks.1.line.weight", torch.full((WIDTH, WIDTH), 0.01 * index))
                if index == 20:
                    engine.eval()
                    with torch.no_grad():  # gathers what is written, maybe where it lay before
                        found.append(engine(*batch_of(case, 0, 0))["loss"].detach())
                    engine.train()
                for micro in range(case.gas):
                    found.append(micro_step(engine, case, batch_of(case, index, micro)))
                if graphs and index == 12:
                    assert before > 0 and engine.stats.replayed_steps == before
            losses.append([float(loss) for loss in found])
            replayed.append(engine.stats.replayed_steps)
            assert engine.stats.captured_windows == graphs  # what is written is gathered to where it lay
            engine.destroy()
    assert losses[0] == losses[1]
    assert replayed[0] >= 10 * case.gas and replayed[1] == 0


@daily(("stage", "gas"), [], [(2, 1), (1, 3), (2, 3)])
def test_whatever_else_a_program_does_is_exact_with_frozen_weights(stage: int, gas: int) -> None:
    differs, graphed = compared(Case(stage, gas, "busy", steps=64, dropout=0.1, frozen=True))
    assert not differs
    assert graphed["captured"] >= 3 and graphed["replayed"] >= 8 * gas, (graphed["uncaptured"], graphed["told"])


def test_micro_steps_in_the_middle_share_their_graphs() -> None:
    few, many = (train(Case(2, gas, steps=12), graphs=True) for gas in (4, 9))
    assert few["replayed"] and many["replayed"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: setattr(model, "reads", True), "not permitted"),
        (lambda model: setattr(model, "noise", iter(range(10**6)).__next__), "does not compute the same twice"),
    ],
)
def test_what_cannot_be_captured_trains_on_and_is_told_once(spoil: Any, why: str) -> None:
    with on_cpu() as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(Case(), graphs=True)
        device.serve(engine)
        spoil(engine.module)
        for step in range(16):
            engine.train_step(batch_of(Case(), step, 0), loss_fn)
        told = [str(each.message) for each in caught if "cuda_graphs" in str(each.message)]
        assert len(told) == 1 and why in told[0], told
        assert engine.stats.replayed_steps == 0 and engine.global_steps == 16
        engine.destroy()


def test_a_backward_that_no_graph_can_serve_is_an_error_that_says_so() -> None:
    with on_cpu() as device:
        case = Case(loop="plain")
        engine = start(case, graphs=True)
        device.serve(engine)
        for step in range(14):
            micro_step(engine, case, batch_of(case, step, 0))
        assert engine.stats.replayed_steps
        output = engine(*batch_of(case, 20, 0))
        with pytest.raises(zw.EngineError, match="gradients of other outputs"):
            engine.backward(output["loss"] + output["spread"])
        engine.zero_grad()
        micro_step(engine, case, batch_of(case, 21, 0))
        loss = engine(*batch_of(case, 22, 0))["loss"]
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="second time"):
            engine.backward(loss)
        engine.zero_grad()
        engine.destroy()


def scaled(graphs: bool) -> tuple[list[float], int]:
    """Losses that read tensors which are neither parameters nor buffers, and how often steps were captured."""
    with on_cpu() as device:
        engine = start(Case(), graphs)
        device.serve(engine)
        model, weight = engine.module, torch.full((), 2.0)
        model.table = {"scale": torch.full((), 3.0)}

        def weighted(output: Any, batch: Any) -> Any:
            return output["loss"] * weight * model.table["scale"]

        losses = []
        for step in range(24):
            if step == 12:
                model.table["scale"] = torch.full((), 5.0)
            losses.append(float(engine.train_step(batch_of(Case(), step, 0), weighted)))
        captured = engine.stats.captured_windows
        engine.destroy()
    return losses, captured


def test_what_modules_and_losses_hold_is_kept_and_looked_for() -> None:
    assert scaled(graphs=True) == (scaled(graphs=False)[0], 2)


def test_options_that_change_with_each_step_end_the_attempts() -> None:
    with on_cpu() as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(Case(), graphs=True)
        device.serve(engine)
        for step in range(24):
            engine.optimizer.param_groups[0]["weight_decay"] = step / 1000
            engine.train_step(batch_of(Case(), step, 0), loss_fn)
        told = [str(each.message) for each in caught if "cuda_graphs" in str(each.message)]
        assert len(told) == 1 and "change every few steps" in told[0] and engine.stats.captured_windows <= 3, told
        engine.destroy()


def test_batches_that_no_graph_can_serve_train_on() -> None:
    with on_cpu() as device:
        engine = start(Case(), graphs=True)
        device.serve(engine)
        for step in range(12):
            x, factor = batch_of(Case(), step, 0)
            engine.train_step((x[:1].expand(4, -1), factor), loss_fn)
        assert any("expanded" in why for why in engine.stats.uncaptured_steps)
        for step in range(20):
            engine(*batch_of(Case(), step, 0))  # forwards without a backward
            micro_step(engine, Case(loop="plain"), batch_of(Case(), step, 1))
        assert engine.global_steps == 32
        engine.destroy()


NOISE = random.Random(0)


@torch.library.custom_op("zeroweave_tests::noisy", mutates_args=())
def noisy(x: Tensor, share: float) -> Tensor:
    """What the device does not compute alike each time: so often, it is something else."""
    return x * (1.0 + NOISE.random() if NOISE.random() < share else 1.0)


def gradients_through(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A loss whose gradient is changed on its way."""

    def weighted(output: Any, batch: Any) -> Tensor:
        loss = loss_fn(output, batch)
        loss.register_hook(change)
        return loss

    return weighted


@contextmanager
def trained_through(
    change: Callable[[Tensor], Tensor], seed: int, begins: Callable[[int], object] = lambda step: None
) -> Iterator[tuple[Any, list[str]]]:
    """An engine behind 16 steps whose loss's gradient is changed on its way, and what it has told of graphs.

    `begins(step)` is called before each.
    """
    NOISE.seed(seed)
    with on_cpu() as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start(Case(), graphs=True)
        device.serve(engine)
        loss_of = gradients_through(change)
        for step in range(16):
            begins(step)
            engine.train_step(batch_of(Case(), step, 0), loss_of)
        yield engine, [str(each.message) for each in caught if "cuda_graphs" in str(each.message)]
        engine.destroy()


@daily(("share", "seed"), [(0.5, 0)], [(share, seed) for share in (0.1, 0.5, 0.9, 1.0) for seed in range(1, 4)])
def test_a_backward_that_is_another_one_now_and_then_is_captured(share: float, seed: int) -> None:
    with trained_through(lambda g: noisy(g, share), seed) as (engine, _):
        assert engine.stats.captured_windows == 1 and engine.stats.replayed_steps >= 4, engine.stats.uncaptured_steps
        assert engine.stats.compile_seconds["graphs"] > 0


@daily(
    ("share", "seed"),
    [(0.0, 0), (0.2, 1)],
    [(0.9, 2), *((share, seed) for share in (0.2, 0.5, 0.9) for seed in range(3, 9))],
)
def test_a_graph_that_computes_something_else_is_refused(share: float, seed: int) -> None:
    def otherwise_in_captures(gradient: Tensor) -> Tensor:
        captured = isinstance(_get_current_dispatch_mode(), Tape)
        return noisy(gradient, share) * (2.0 if captured else 1.0)

    with trained_through(otherwise_in_captures, seed) as (engine, told):
        assert len(told) == 1 and "its replay differs in optimizer state of" in told[0], told
        assert engine.stats.replayed_steps == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_graph_that_noise_may_have_spoilt_is_captured_again(share: float) -> None:
    """Without noise the first one is wrong, whatever others may be."""
    steps, captured = list[int](), list[int]()

    def watch() -> Generator[bool, bool, None]:
        """Hears whether a capture runs, and tells whether it is that of the first window. No number of the loss's."""
        captures = yield False
        while True:
            if captures and steps[-1] not in captured:
                captured.append(steps[-1])
            captures = yield captures and steps[-1:] == captured

    watching = watch()
    next(watching)

    def otherwise_in_the_first_capture(gradient: Tensor) -> Tensor:
        wrong = watching.send(isinstance(_get_current_dispatch_mode(), Tape))
        return noisy(gradient, share) * (2.0 if wrong else 1.0)

    with trained_through(otherwise_in_the_first_capture, 0, steps.append) as (engine, told):
        trials, graphs = (2, 1) if share else (1, 0)
        assert (len(captured), engine.stats.captured_windows, len(told)) == (trials, graphs, 1 - graphs)
        assert (engine.stats.replayed_steps >= 4) == bool(graphs)


def test_graphs_of_schedules_that_are_gone_go() -> None:
    """Those of kinds of windows that may come again stay."""
    with started(Case(sizes=(4, 6)), graphs=True) as engine:
        known, step = engine._graphs.known, 0

        def run(steps: int) -> None:
            nonlocal step
            for _ in range(steps):
                micro_step(engine, Case(), batch_of(Case(sizes=(4, 6)), step, 0))
                step += 1

        def followed() -> list[bool]:
            return [window.schedule is engine.schedule for window in known.windows]

        run(20)
        assert followed() == [True, True]
        with engine.record() as record:
            run(1)
        plan = engine.compile_schedule(record.operations, fuse=False)
        with plan.execute():  # what comes behind it is known
            run(12)
            assert followed() == [False, False, True, True]
        run(2)
        assert followed() == [True, True] and known.captured == 4
        engine.reschedule(fuse=False)
        run(12)
        assert followed() == [True, True] and known.captured == 6
