"""Schedules on GPUs: every one gives the same gradients, fused gathers are one launch, steps are timed by events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import schedule_jobs as jobs

Ranks = Callable[..., list[Any]]

CHANGES: list[dict[str, Any]] = [
    {"prefetch": 1},
    {"fuse": True},
    {"prefetch": 2, "depth": 4},
    {"keep": "all"},
    {"keep": "none", "prefetch": 0, "fuse": False, "depth": 1},
]


def test_every_schedule_gives_the_same_gradients(ranks: Ranks) -> None:
    for found in ranks(jobs.schedules, CHANGES):
        assert all(same and followed and not graphs for same, followed, _, _, graphs in found)
        assert [fused for _, _, fused, _, _ in found] == [False, True, True, True, False]
        gathers = [count for *_, count, _ in found]
        assert gathers[3] < min(gathers[:3])


def test_steps_are_timed(ranks: Ranks) -> None:
    for operations, seconds, predicted, followed, peak in ranks(jobs.recorded):
        assert followed and peak > 0
        assert operations and all(0 < took < seconds for _, took in operations)
        assert 0 < predicted < 2 * seconds


@pytest.mark.parametrize("gathers", ["kernel", pytest.param("copy_engine", marks=pytest.mark.gpus(2))])
def test_a_launch_is_measured_as_one(ranks: Ranks, gathers: str) -> None:
    """By kernel: copies share none, whatever their schedule fuses."""
    for fused, launches, others in ranks(jobs.launched, gathers):
        assert fused and launches == (fused if gathers == "kernel" else 0) and not others
