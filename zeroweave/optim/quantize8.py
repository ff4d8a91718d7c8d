"""Moments in 8 bits an element: a code for each, and a float32 scale for each block of 64.

A block's scale is its largest magnitude, and a code tells the share of it that an element has, finer near zero:

    int8     code of -127 to 127    share = (code / 127)^2, with the code's sign      first moments
    uint8    code of 0 to 255       share = (code / 255)^4                            second moments, never negative

What is not zero never becomes a second moment of zero: updates are divided by its root. First moments go to the nearest
code; second ones up or down by chance, with the probability of how near each is (see `comm.rounding.noise_`). They
change by a thousandth in a step, less than half the way to the next code, and would stay what they once were.
`benchmarks/compact.py` has what other codes cost.

What a code means is coded as that code again, with any noise: where nothing has changed, nothing changes.

Blocks are those of the flat: slots and shards begin at multiples of 128 bytes, which are 64 bfloat16. So a block is of
one parameter, and the same on any number of ranks. Chance is that of an offset in the flat: it is the same wherever a
parameter has the same offset in its bucket, see `layout`. The idea of codes by block is that of Dettmers et al., 8-bit
Optimizers via Block-wise Quantization, 2022, arXiv 2110.02861.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from zeroweave._triton import CHANCES, CODED_BLOCK, LEAST_SCALE

BLOCK: Final = CODED_BLOCK
_AT_ONCE: Final = 1 << 22
"""Elements, whole blocks: what is made on the way takes some bytes of each."""


class Coded(NamedTuple):
    """Moments of n elements: `codes` [n], int8 or uint8, and `scales` [ceil(n / 64)], float32."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, numel: int, kind: torch.dtype, device: torch.device) -> Coded:
        scales = torch.zeros(-(-numel // BLOCK), dtype=torch.float32, device=device)
        return cls(torch.zeros(numel, dtype=kind, device=device), scales)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def of(self, start: int, stop: int) -> Coded:
        """The elements from `start`, the first of a block, to `stop`: views."""
        return Coded(self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)])


@torch.no_grad()
def encode_(coded: Coded, values: torch.Tensor, random: torch.Tensor | None = None) -> None:
    """Overwrites `coded` with `values` [n], float32, n a multiple of 64. A block with an infinity or a NaN is all NaN.

    `random`, int32 [n]: bits by which shares between two codes of uint8 are rounded; None: to the nearer code.
    """
    signed = coded.codes.dtype == torch.int8
    for start in range(0, values.numel(), _AT_ONCE):
        part = values[start : start + _AT_ONCE].view(-1, BLOCK)
        codes, scales = coded.of(start, start + part.numel())
        size = part.abs()
        torch.amax(torch.where(size.isfinite(), size, torch.inf), 1, out=scales)
        scales.clamp_(min=LEAST_SCALE)
        size = size.div_(scales.unsqueeze(1)).sqrt_()
        if signed:
            size = size.mul_(127.0).add_(0.5).floor_().copysign_(part)
        else:
            own = None if random is None else random[start : start + part.numel()].view_as(part)
            up = 0.5 if own is None else (((own >> 8) & (CHANCES - 1)).float() + 0.5) / CHANCES
            lasting = (part > 0).logical_and_(scales.isfinite().unsqueeze(1))  # infinity times zero is NaN
            size = size.sqrt_().mul_(255.0).add_(up).floor_().clamp_(min=1.0).mul_(lasting)
        codes.copy_(size.nan_to_num_(0.0).view(-1))


@torch.no_grad()
def decode(coded: Coded) -> torch.Tensor:
    """The values [n], float32."""
    numel = coded.codes.numel()
    values = torch.empty(numel, dtype=torch.float32, device=coded.codes.device)
    for start in range(0, numel, _AT_ONCE):
        codes, scales = coded.of(start, min(start + _AT_ONCE, numel))
        share = codes.to(torch.float32)
        signed = codes.dtype == torch.int8
        # by a tensor: of a number GPUs take the reciprocal, and host memory and kernels have other last places then
        share.div_(torch.full_like(share[:1], 127.0 if signed else 255.0))
        share = share.mul_(share.abs()) if signed else share.square_().square_()
        values[start : start + share.numel()] = share.mul_(scales.repeat_interleave(BLOCK)[: share.numel()])
    return values
