"""Windows of several backwards on GPUs: equal gradients however they come together, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import window_jobs

N = 4
MIB = 2**20


@pytest.mark.parametrize(
    ("stage", "mode", "tolerance"), [(1, "eager", 1e-6), (2, "inductor", 1e-5), (3, "eager", 1e-6)]
)
def test_no_sync_and_coalesced_windows(
    ranks: Callable[..., list[Any]], stage: int, mode: str, tolerance: float
) -> None:
    for found in ranks(window_jobs.windows, stage, mode, N):
        assert max(found.differences.values())[0] <= tolerance, found
        assert found.reductions == {"plain": 1 if stage == 1 else N, "no_sync": 1, "coalesced": 1}
        assert found.local_sums == 4 * found.elements and found.grown <= MIB, found
