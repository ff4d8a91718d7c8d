"""Gradients that matmuls write where they are reduced from, by the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compile.test_destinations import judge, judge_sums
from tests.gpu.jobs import deterministic, join

Ranks = Callable[..., list[Any]]


def judged(lower: str, dtype: torch.dtype) -> None:
    """Inductor takes by time how a reduction goes, of each graph anew, and with it the order of its sums."""
    with deterministic():
        judge(lower, str(join()), dtype)
        for sums in {dtype, torch.float32}:
            judge_sums(lower, str(join()), dtype, sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_matmuls_write_and_add_where_they_are_told_to(ranks: Ranks, lower: str, dtype: torch.dtype) -> None:
    ranks(judged, lower, dtype)
