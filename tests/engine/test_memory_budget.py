"""What is free is filled by default where somebody counts, to the last byte that may be, and given back in time."""

from __future__ import annotations

import pytest

from tests.distributed.schedule.test_memory import ALL, kept, training

pytestmark = pytest.mark.usefixtures("flats_apart")

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
        told = [each.reason for each in engine._context.journal.take()]
        assert sum("memory is short" in each for each in told) == 1
