"""Numbers that kernels share with what computes the same without them. No Triton."""

from __future__ import annotations

from typing import Final

from zeroweave.layout import ALIGN_BYTES

CODED_BLOCK: Final = ALIGN_BYTES // 2
"""Elements, bfloat16, of the blocks of `optim.codes`."""
LEAST_SCALE: Final = 2.0**-94
"""Scales are not smaller: the least share of it is a normal float32 still, and keeps its code."""
CHANCES: Final = 4096
"""Between two codes; by bits of noise that no master is rounded by."""
