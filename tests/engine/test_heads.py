"""Buckets that are gathered anew at the end of a step, in a world of one: whatever fails leaves no older values."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import zeroweave as zw
from tests.support.marks import daily
from tests.support.replays import WIDTH, Case, batch_of, compared, micro_step, start, started
from zeroweave.comm.process_group import LocalTransport

ROWS = [
    *(
        Case(stage, gas, loop, dropout=0.1)
        for stage, gas, loop in ((3, 1, "train_step"), (2, 2, "plain"), (1, 3, "plain"))
    ),
    *(Case(stage, 1, "busy", steps=64, dropout=0.1) for stage in (1, 2, 3)),
    Case(2, sizes=(4, 6)),
    Case(3, 2, overflow=20, clipping=0.1, decay=True),
]


@daily("case", ROWS[:1], ROWS[1:], ids=str)
def test_replayed_steps_are_exact(case: Case) -> None:
    differs, graphed = compared(Case(**{**vars(case), "heads": True}))
    assert not differs and graphed["regathers"] == 2
    assert graphed["captured"] and graphed["replayed"] >= 8 * case.gas, (graphed["uncaptured"], graphed["told"])


def trained(stage: int, heads: bool, fails: int = 0) -> tuple[dict[str, Any], bool]:
    """The parameters after 14 steps, in the tenth of which the gather of that number fails, and did it?"""
    usual, left = LocalTransport.all_gather, [0]

    def all_gather(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no memory is left")
        return usual(*arguments)

    engine, failed = start(Case(stage, heads=heads), graphs=False), False
    with patch.object(LocalTransport, "all_gather", all_gather):
        for step in range(14):
            loss = engine(*batch_of(Case(), step, 0))["loss"]
            engine.backward(loss)
            left[0] = fails if step == 10 else 0
            try:
                engine.step()
            except MemoryError:
                failed = True
                engine.zero_grad()
            left[0] = 0
    assert bool(engine.schedule.regathers) == heads
    values = {name: value.tolist() for name, value in engine.state_dict().items()}
    engine.destroy()
    return values, failed


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_behind_a_gather_that_failed(stage: int) -> None:
    """The parameters were updated before it."""
    plain, _ = trained(stage, heads=False)
    for fails in (1, 2):
        values, failed = trained(stage, heads=True, fails=fails)
        assert failed and values == plain


@pytest.mark.parametrize("number", [1, 2])
def test_a_capture_that_fails_there_leaves_no_older_values(number: int) -> None:
    """Its rank has lost what stays, and gathers it again before it is used."""
    found = []
    for graphs in (True, False):
        case = Case(3, heads=graphs)
        with started(case, graphs) as engine:
            usual, calls = LocalTransport.all_gather, []

            def all_gather(
                transport: Any, *arguments: Any, engine: Any = engine, usual: Any = usual, calls: Any = calls
            ) -> Any:
                if engine._parts.transport.captures:
                    calls.append(1)
                    if len(calls) == engine_gathers(engine) + number:
                        raise RuntimeError("out of memory")
                return usual(transport, *arguments)

            with patch.object(LocalTransport, "all_gather", all_gather):
                losses = [float(micro_step(engine, case, batch_of(case, step, 0))) for step in range(20)]
            if graphs:
                assert len(calls) >= number and engine.stats.captured_windows == 0
            found.append((losses, {name: value.tolist() for name, value in engine.state_dict().items()}))
    assert found[0] == found[1]


def engine_gathers(engine: zw.Engine) -> int:
    """Gathers of a step, in front of those that gather anew."""
    schedule = engine.schedule
    assert schedule is not None
    return sum(kind == "all_gather" for kind, _ in schedule.collectives()) - len(schedule.regathers)


def trains(engine: zw.Engine, steps: int) -> None:
    for step in range(steps):
        micro_step(engine, Case(), batch_of(Case(), step, 0))


def test_where_step_gathers_all_of_the_model_nothing_is_gathered_anew() -> None:
    for gathers, most in ((False, 2), (True, 0)):
        engine = start(Case(2, heads=True, config={"gather_after_step": gathers}), graphs=False)
        trains(engine, 10)
        assert engine.schedule is not None and len(engine.schedule.regathers) == most
        engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_it_ends_and_comes_back_by_reschedule(stage: int) -> None:
    """And with it the memory between two steps."""
    engine = start(Case(stage, heads=True), graphs=False)
    trains(engine, 10)
    schedule = engine.schedule
    assert schedule is not None and len(schedule.regathers) == 2
    stands = sum(schedule.facts.sizes[bucket] for bucket in schedule.regathers)
    assert engine._runtime.flats.now == stands
    engine.set_full("blocks.0.norm.bias", torch.ones(WIDTH))
    assert engine._runtime.flats.now == stands  # the memory stays, where graphs know it
    for regather in (False, True):
        engine.reschedule(regather=regather)
        assert engine.schedule is not None and len(engine.schedule.regathers) == 2 * regather
        assert engine._runtime.flats.now == 0
        trains(engine, 2)
        assert engine._runtime.flats.now == stands * regather
    engine.destroy()
