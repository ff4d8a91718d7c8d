"""Means of what several ranks have sent, in one pass: what `comm.sums` says."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from zeroweave._triton.masters import programs

_SIZE: Final = 2048
"""Elements of one program."""


@triton.jit
def _mean(out, parts, numel, before, after, COUNT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    part = parts + at
    total = tl.div_rn(tl.load(part, there).to(tl.float32), before)
    for _ in tl.static_range(1, COUNT):
        part += numel
        total += tl.div_rn(tl.load(part, there).to(tl.float32), before)
    tl.store(out + at, tl.div_rn(total, after).to(out.dtype.element_ty), there)


def mean_(out: torch.Tensor, parts: torch.Tensor, divisor: int, divide_first: bool) -> None:
    """See `comm.sums.mean_`: contiguous."""
    before, after = (divisor, 1) if divide_first else (1, divisor)
    grid = programs(out.numel(), _SIZE)
    _mean[grid](out, parts, out.numel(), float(before), float(after), COUNT=parts.shape[0], SIZE=_SIZE)
