"""Copies that a graph captures: by a kernel of ours where there are whole words, by the driver's elsewhere."""

from __future__ import annotations

import pytest
import torch

from zeroweave._triton import kernels
from zeroweave.comm.rounding import cast_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("numel", [1 << 20, 4099, 1, 0])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_captured_copy_is_one(numel: int, start: int, dtype: torch.dtype) -> None:
    kernels("masters", "cuda")
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    values = torch.zeros(numel + 8, dtype=bits, device="cuda").view(dtype)
    target = torch.zeros_like(values)
    part = slice(start, start + numel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cast_(target[part], values[part])
    limits = torch.iinfo(bits)
    for _ in range(2):
        values.view(bits).random_(limits.min, limits.max)
        target.zero_()
        graph.replay()
        assert torch.equal(target[part].view(bits), values[part].view(bits))
        assert not target[:start].view(bits).any() and not target[start + numel :].view(bits).any()


def test_what_differs_in_shape_is_spread_in_a_capture() -> None:
    target, values = torch.zeros(4, 4, device="cuda"), torch.arange(4.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cast_(target, values)
    graph.replay()
    assert torch.equal(target, values.expand(4, 4))
