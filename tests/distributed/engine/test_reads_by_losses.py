"""Losses that read parameters between forward and backward: what is gathered and reduced for that, and when it goes."""

from __future__ import annotations

import pytest
import torch

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES
from tests.support.outside_models import Hidden, in_chunks
from tests.support.zoo import tokens
from zeroweave.schedule import Instruction, Reduce, Unshard

Counts = dict[str, tuple[int, int]]


def counted(instructions: tuple[Instruction, ...], engine: zw.Engine) -> Counts:
    """By bucket: how many gathers and reductions there are."""
    schedule = engine.schedule
    assert schedule is not None and instructions == schedule.instructions
    gathers = [schedule.instructions[index] for index in schedule.gathers]
    return {
        b.name: (sum(i == Unshard(b.id) for i in gathers), sum(i == Reduce(b.id) for i in instructions))
        for b in engine.buckets
    }


def trained(mode: str, stage: int, gas: int) -> tuple[Counts, bool]:
    """The last step's counts, and whether the head was gone behind the backward."""
    torch.manual_seed(0)
    model = Hidden()
    config = {
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "compile": {**MODES[mode], "prefetch": 1, "keep": "none"},
    }
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        head = next(b for b in engine._runtime.buckets.values() if b.layout.name == "head")
        for index in range(4 * gas):
            in_chunks(engine, model, tokens(engine.rank, index), engine.backward)
            gone = not head.resident
            engine.step()
        return counted(engine.executed, engine), gone


@pytest.mark.parametrize("gas", [1, pytest.param(3, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("eager", marks=pytest.mark.matrix)])
def test_a_read_is_one_gather_and_one_reduction(pools: Pools, mode: str, gas: int) -> None:
    for counts, gone in pools(2).run(trained, mode, 3, gas):
        assert counts["head"] == (gas, gas)
        assert {reductions for _, reductions in counts.values()} == {gas}
        assert gone


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "gathers", "reductions"), [(1, 1, 1), (2, 1, 3)])
def test_where_parameters_stay_a_read_gathers_nothing_more(
    pools: Pools, stage: int, gathers: int, reductions: int
) -> None:
    for counts, _ in pools(2).run(trained, "eager", stage, 3):
        assert set(counts.values()) == {(gathers, reductions)}
