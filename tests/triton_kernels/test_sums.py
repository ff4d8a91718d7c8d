"""Means over ranks by the kernel, beside those without one."""

from __future__ import annotations

import pytest
import torch

from tests.triton_kernels.kernels import HERE, sums
from zeroweave.comm.sums import mean_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("ranks", "divisor"), [(1, 1), (2, 2), (3, 3), (4, 8)])
@pytest.mark.parametrize("numel", [8, 2048, 5000])
@pytest.mark.parametrize("divide_first", [False, True])
def test_the_bits_are_the_same(dtype: torch.dtype, ranks: int, divisor: int, numel: int, divide_first: bool) -> None:
    if HERE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter makes a bfloat16 by cutting bits off")
    parts = torch.randn(ranks, numel, device=HERE).to(dtype)
    parts[0, 0] = float("inf")
    fast, slow = torch.empty(numel, dtype=dtype, device=HERE), torch.empty(numel, dtype=dtype)
    sums.mean_(fast, parts, divisor, divide_first)
    mean_(slow, parts.cpu(), divisor, divide_first)  # PyTorch's own quotients on a GPU are products with 1 / divisor
    assert fast.cpu().equal(slow)
