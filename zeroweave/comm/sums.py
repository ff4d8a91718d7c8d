"""What a reduction computes where it is more than moving bytes: a sum over ranks, divided, and rounded once."""

from __future__ import annotations

from typing import Final

import torch

from zeroweave._triton import kernels

_AT_ONCE: Final = 1 << 22
"""Elements: their float32 sums are made on the way."""


@torch.no_grad()
def mean_(out: torch.Tensor, parts: torch.Tensor, divisor: int) -> None:
    """Overwrites `out` [n] with the sum of the rows of `parts` [ranks, n], divided by `divisor`; of one floating dtype.

    The rows are added in their order, in float32, and the quotient is rounded to the nearest.
    """
    if (fast := kernels("sums", out.device.type)) is not None:
        fast.mean_(out, parts, divisor)
        return
    for target, rows in zip(out.split(_AT_ONCE), parts.split(_AT_ONCE, dim=1), strict=True):
        total = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            total += row
        target.copy_(total.div_(divisor))
