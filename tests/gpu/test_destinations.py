"""Gradients that matmuls write where they are reduced from, by the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.compile.test_destinations import judge


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_matmuls_write_where_they_are_told_to(lower: str, dtype: torch.dtype) -> None:
    judge(lower, "cuda", dtype)
