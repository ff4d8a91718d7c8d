"""Means over ranks: added in order in float32, rounded once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from zeroweave.comm.sums import mean_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ranks", "divisor"), [(1, 1), (2, 2), (3, 3), (4, 4), (2, 6)])
@pytest.mark.parametrize("divide_first", [False, True])
def test_a_mean_is_rounded_once(dtype: torch.dtype, ranks: int, divisor: int, divide_first: bool) -> None:
    parts = torch.randn(ranks, 1000).to(dtype)
    out = torch.empty(1000, dtype=dtype)
    with patch("zeroweave.comm.sums._AT_ONCE", 96):
        mean_(out, parts, divisor, divide_first)
    total = torch.zeros(1000)
    for part in parts:
        total = total + (part.float() / divisor if divide_first else part.float())
    assert out.equal((total if divide_first else total / divisor).to(dtype))


def test_a_sum_may_be_larger_than_what_it_adds_up_can_be() -> None:
    parts = torch.full((4, 8), 60000.0, dtype=torch.float16)
    out = torch.empty(8, dtype=torch.float16)
    mean_(out, parts, 4)
    assert out.equal(parts[0])


def test_what_is_not_finite_stays_so() -> None:
    parts = torch.tensor([[1.0, float("inf"), float("nan")], [1.0, 1.0, float("inf")]])
    out = torch.empty(3)
    mean_(out, parts, 2)
    assert out[0] == 1 and out[1] == float("inf") and out[2].isnan()
