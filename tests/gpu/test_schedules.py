"""Schedules on GPUs: every one gives the same gradients, steps are timed by events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu import schedule_jobs as jobs

Ranks = Callable[..., list[Any]]

CHANGES: list[dict[str, Any]] = [
    {"prefetch": 1},
    {"prefetch": 2, "depth": 4},
    {"keep": "all"},
    {"keep": "none", "prefetch": 0, "depth": 1},
]


def test_every_schedule_gives_the_same_gradients(ranks: Ranks) -> None:
    for found in ranks(jobs.schedules, CHANGES):
        assert all(same and followed and not graphs for same, followed, _, graphs in found)
        gathers = [count for *_, count, _ in found]
        assert gathers[2] < min(gathers[:2])


def test_steps_are_timed(ranks: Ranks) -> None:
    for operations, seconds, predicted, followed, peak in ranks(jobs.recorded):
        assert followed and peak > 0
        assert operations and all(0 < took < seconds for _, took in operations)
        assert 0 < predicted < 2 * seconds
