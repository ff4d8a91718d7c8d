"""What is free is filled by default where somebody counts, to the last byte that may be, and given back in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.schedule.test_memory import ALL, kept, training
from tests.support.graphs import on_cpu
from tests.support.memory import counted
from tests.support.replays import Case, batch_of, loss_fn, start

SMALL = 78_000
"""Bytes of a device that has room for some buckets more and not for all."""
MOST = SMALL * 95 // 100


def test_what_just_fits_changes_nothing_and_a_byte_more_does() -> None:
    with training(SMALL) as (engine, clock, step), training(SMALL, memory_budget="none") as (bare, _, plain):
        for most in (0, 0, 0, 0):
            assert step(most) == plain()
        before, device = kept(engine), engine.stats.device
        assert set(kept(bare)) < set(before) < set(ALL) and bare.schedule.facts.memory is None
        assert clock.peak() <= device.foreseen <= device.budget + 20_000 and device.allocated == clock.peak()
        found = []
        for most in (MOST, MOST, MOST + 1, MOST + 1, 0):
            assert step(most) == plain()
            found.append(kept(engine))
        assert found[:2] == [before] * 2 and found[2:] == [found[2]] * 3
        assert set(kept(bare)) <= set(found[2]) and len(found[2]) < len(before)
        assert engine.stats.departures == 0
        told = [each.reason for each in engine._parts.journal.take()]
        assert sum("memory is short" in each for each in told) == 1


@pytest.mark.matrix
def test_graphs_are_captured_anew_and_train_the_same() -> None:
    """Windows that were captured, and that are replayed again behind a schedule that fills less."""
    losses, captured = [], []
    case = Case(steps=40)
    for graphs in (True, False):
        with counted(36_000) as clock, on_cpu() as device:
            engine = start(case, graphs)
            clock.attach(engine)
            device.serve(engine)
            found = []
            for index in range(case.steps):
                before = engine.schedule
                if index == 20:  # of another shape, so that it runs as ever
                    replayed = engine.stats.replayed_steps

                    def refused(*args: Any) -> torch.Tensor:
                        clock.refused += 1
                        return loss_fn(*args)

                    found.append(engine.train_step(batch_of(replace(case, sizes=(6,)), index, 0), refused))
                    assert engine.stats.replayed_steps == replayed
                    if graphs:  # without them there is twice the room
                        assert len(kept(engine)) < len(before.facts.buckets) and engine.schedule is not before
                else:
                    found.append(engine.train_step(batch_of(case, index, 0), loss_fn))
                    assert index < 10 or engine.schedule is before
            losses.append([float(loss) for loss in found])
            captured.append((engine.stats.captured_windows, engine.stats.replayed_steps))
            engine.destroy()
    assert losses[0] == losses[1]
    assert captured[0][0] == 2 and captured[0][1] > 20 and captured[1] == (0, 0)
