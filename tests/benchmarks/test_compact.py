"""Compact states train as full ones do: the losses of the demo model, some hundred steps."""

from __future__ import annotations

import pytest

from benchmarks.compact import COMPACT, FULL, Run, run, table

STEPS = 150


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.matrix
def test_losses_of_compact_states_follow_those_of_full_ones() -> None:
    full, compact = (run(kind, 0, STEPS) for kind in (FULL, COMPACT))
    for start in range(0, STEPS, 30):
        one, other = (mean(each.losses[start : start + 30]) for each in (compact, full))
        # Runs that differ in rounding alone drift apart by up to 2 %, and otherwise on each processor. Codes that lose
        # small second moments are at twice the loss within 60 steps.
        assert one == pytest.approx(other, rel=0.05), f"from step {start} on"
    assert (full.nbytes, compact.nbytes) == pytest.approx((12.0, 5.125), rel=0.002)


def test_a_table_has_a_row_for_each_stretch() -> None:
    runs = {kind: [Run([2.0, 1.0, 1.0, 0.5], 12.0), Run([4.0, 1.0, 1.0, 0.5], 12.0)] for kind in (FULL, COMPACT)}
    lines = list(table(runs, 2))
    assert lines[2] == "| 1–2 | 2.0000 | 2.0000 | +0.0000, +0.0000 | 1.0000 |"
    assert lines[3].startswith("| 3–4 | 0.7500 |")
