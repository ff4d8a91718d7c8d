"""Streams on GPUs: whatever comes late, whoever needs it waits; and nobody writes what is still being read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import stream_jobs as jobs

Ranks = Callable[..., list[Any]]

STEPS = 200
SMALL, WHOLE = 4096, 1 << 30


@pytest.mark.parametrize("nbytes", [SMALL, WHOLE])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_delays_change_no_bit(ranks: Ranks, stage: int, nbytes: int) -> None:
    assert ranks(jobs.late, stage, nbytes, "aot_eager", {}, STEPS) == [(True, True, True)] * 2


@pytest.mark.parametrize("changes", [{"prefetch": 3}, {"prefetch": 0}])
def test_delays_change_no_bit_under_other_schedules(ranks: Ranks, changes: dict[str, Any]) -> None:
    assert ranks(jobs.late, 3, SMALL, "aot_eager", changes, STEPS) == [(True, True, True)] * 2


def test_delays_change_no_bit_of_eager_modules(ranks: Ranks) -> None:
    assert ranks(jobs.late, 3, SMALL, None, {}, STEPS // 4) == [(True, True, True)] * 2


@pytest.mark.gpus(2)
def test_delays_change_no_bit_of_copy_engines(ranks: Ranks) -> None:
    assert ranks(jobs.late, 3, SMALL, "aot_eager", {}, STEPS, "copy_engine") == [(True, True, True)] * 2


@pytest.mark.parametrize("lower", [None, "aot_eager"])
def test_gradients_that_arrive_on_another_stream_change_no_bit(ranks: Ranks, lower: str | None) -> None:
    assert ranks(jobs.on_a_stream_of_an_earlier_forward, lower) == [True, True]
