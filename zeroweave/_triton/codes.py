"""Moments in 8 bits, as `optim.codes` says: what a kernel has of some whole blocks, [blocks, 64]."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from zeroweave._triton import CHANCES, CODED_BLOCK, LEAST_SCALE

PER_SCALE: Final = tl.constexpr(CODED_BLOCK)
"""Elements of a block."""
_LEAST: Final = tl.constexpr(LEAST_SCALE)
_CHANCES: Final = tl.constexpr(CHANCES)
_CHANCE: Final = tl.constexpr(1 / CHANCES)


@triton.jit
def first_of(codes, scales):
    """First moments, of int8 and float32 [blocks]."""
    share = tl.div_rn(codes.to(tl.float32), 127.0)
    return share * tl.abs(share) * scales[:, None]


@triton.jit
def second_of(codes, scales):
    """Second moments, of uint8 and float32 [blocks]."""
    share = tl.div_rn(codes.to(tl.float32), 255.0)
    share = share * share
    return share * share * scales[:, None]


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def scales_of(values, there):
    """By block: the largest magnitude; infinite where something is not finite."""
    size = tl.where(there, tl.abs(values), 0.0)
    return tl.maximum(tl.reduce(tl.where(size < float("inf"), size, float("inf")), 1, _larger), _LEAST)


@triton.jit
def first_codes(values, scales):
    size = tl.floor(tl.sqrt_rn(tl.div_rn(tl.abs(values), scales[:, None])) * 127.0 + 0.5)
    size = tl.where(size == size, size, 0.0)
    return tl.where(values < 0, -size, size).to(tl.int32).to(tl.int8)


@triton.jit
def second_codes(values, scales, random):
    """`random`: int32, as of `masters.noise`."""
    up = (((random >> 8) & (_CHANCES - 1)).to(tl.float32) + 0.5) * _CHANCE
    size = tl.floor(tl.sqrt_rn(tl.sqrt_rn(tl.div_rn(values, scales[:, None]))) * 255.0 + up)
    size = tl.where(size == size, tl.maximum(size, 1.0), 0.0)
    lasting = (values > 0) & (scales[:, None] < float("inf"))
    return tl.where(lasting, size, 0.0).to(tl.int32).to(tl.uint8)
