"""What NCCL ran, counted by the profiler, is what the schedule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.communication_jobs import counts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kernels_equal_the_schedule(ranks: Callable[..., list[Any]], stage: int) -> None:
    for found in ranks(counts, stage):
        moved = {k: n for k, n in found.ledger.items() if n}
        assert found.traced == found.scheduled == moved, found
        if found.traced_bytes is not None:
            assert found.traced_bytes == {k: n for k, n in found.ledger_bytes.items() if n}, found
