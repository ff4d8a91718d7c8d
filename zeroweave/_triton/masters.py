"""Float32 masters on GPUs, whole or split into bfloat16 and a remainder: what `comm.rounding` says, in one pass."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 1024
"""Elements of one program."""


@triton.jit
def noise(position, step):
    """Random bits, int32, for elements at positions, int64, at a step, int32: see `comm.rounding.noise_`."""
    bits = position.to(tl.int32) * 0x1E35A7BD + step * 0x5BD1E995
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * 0x46CA68B5
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def of_24_bits(bits, up):
    """The bits of a master without the low 8, which are rounded by `up`, 0 to 255."""
    return (bits + up) & ~0xFF


@triton.jit
def joined(shard, remainder, MISSING: tl.constexpr):
    """The master of a bfloat16 and a remainder that has no room for so many of its 16 bits."""
    low = remainder.to(tl.int32) << MISSING
    high = shard.to(tl.int16, bitcast=True).to(tl.int32)
    return (((high + (low >> 15)) << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bits_of(master):
    """int32; all NaNs are one, to which half a unit can be added."""
    bits = master.to(tl.int32, bitcast=True)
    return tl.where(master != master, 0x7FC00000, bits)


@triton.jit
def shard_of(bits):
    """The bfloat16 nearest to a master of these bits."""
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _cast(target, values, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    tl.store(target + at, shard_of(bits_of(tl.load(values + at, there))), there)


@triton.jit
def _split(masters, shard, remainder, random, numel, MISSING: tl.constexpr, RANDOM: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    bits = bits_of(tl.load(masters + at, there))
    if MISSING:
        bits = of_24_bits(bits, tl.load(random + at, there) & 0xFF if RANDOM else 0x80)
    tl.store(shard + at, shard_of(bits), there)
    low = bits >> MISSING
    tl.store(remainder + at, low.to(tl.int8) if MISSING else low.to(tl.int16), there)


@triton.jit
def _join(masters, shard, remainder, numel, MISSING: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    tl.store(masters + at, joined(tl.load(shard + at, there), tl.load(remainder + at, there), MISSING), there)


def cast_(target: torch.Tensor, values: torch.Tensor) -> None:
    """See `comm.rounding.cast_`: contiguous bfloat16, float32."""
    _cast[programs(values.numel())](target, values, values.numel(), SIZE=BLOCK)


def split_(
    masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor, random: torch.Tensor | None = None
) -> None:
    """See `comm.rounding.split_`."""
    by_chance, missing = random is not None, 16 - 8 * remainder.itemsize
    _split[programs(masters.numel())](
        masters, shard, remainder, random if by_chance else shard, masters.numel(), MISSING=missing, RANDOM=by_chance,
        SIZE=BLOCK,
    )  # fmt: skip


def join_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> None:
    """See `comm.rounding.join_`."""
    missing = 16 - 8 * remainder.itemsize
    _join[programs(masters.numel())](masters, shard, remainder, masters.numel(), MISSING=missing, SIZE=BLOCK)


def try_out() -> None:
    """RuntimeError, or one of Triton's, where kernels do not run, or compute something else."""
    values = torch.linspace(-3.0, 3.0, 4 * BLOCK, dtype=torch.float32, device="cuda")
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    cast_(rounded, values)
    if not torch.equal(rounded, values.to(torch.bfloat16)):
        raise RuntimeError("a kernel has rounded wrongly")


def programs(numel: int) -> tuple[int]:
    """A grid over the elements, at least one, of which a program takes `BLOCK`."""
    return (-(-numel // BLOCK),)
