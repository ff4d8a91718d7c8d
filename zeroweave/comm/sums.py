"""What a reduction computes where copy engines move the bytes: a sum over ranks, divided, and rounded once."""

from __future__ import annotations

from typing import Final

import torch

from zeroweave._triton import kernels

_AT_ONCE: Final = 1 << 22
"""Elements: their float32 sums are made on the way."""


@torch.no_grad()
def mean_(out: torch.Tensor, parts: torch.Tensor, divisor: int, divide_first: bool = False) -> None:
    """Overwrites `out` [n] with the sum of the rows of `parts` [ranks, n], divided by `divisor`; of one floating dtype.

    All of it is computed in float32, in the order of the rows, and what comes out is rounded to the nearest.
    `divide_first`: each row, so that no sum is too large for float32.
    """
    if (fast := kernels("sums", out.device.type)) is not None:
        fast.mean_(out, parts, divisor, divide_first)
        return
    before, after = (divisor, 1) if divide_first else (1, divisor)
    for target, rows in zip(out.split(_AT_ONCE), parts.split(_AT_ONCE, dim=1), strict=True):
        total = rows[0].float() / before
        for row in rows[1:]:
            total += row.float() / before
        target.copy_(total / after)
