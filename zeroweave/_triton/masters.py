"""Float32 masters on GPUs, whole or split into bfloat16 and a remainder: what `comm.rounding` says, in one pass."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 1024
"""Elements of one program."""


@triton.jit
def joined(shard, remainder):
    """The master of a bfloat16 and an int16."""
    low = remainder.to(tl.int32)
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
def _split(masters, shard, remainder, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    bits = bits_of(tl.load(masters + at, there))
    tl.store(shard + at, shard_of(bits), there)
    tl.store(remainder + at, bits.to(tl.int16), there)


@triton.jit
def _join(masters, shard, remainder, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    tl.store(masters + at, joined(tl.load(shard + at, there), tl.load(remainder + at, there)), there)


def cast_(target: torch.Tensor, values: torch.Tensor) -> None:
    """See `comm.rounding.cast_`: contiguous bfloat16, float32."""
    _cast[programs(values.numel())](target, values, values.numel(), SIZE=BLOCK)


def split_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> None:
    """See `comm.rounding.split_`."""
    _split[programs(masters.numel())](masters, shard, remainder, masters.numel(), SIZE=BLOCK)


def join_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> None:
    """See `comm.rounding.join_`."""
    _join[programs(masters.numel())](masters, shard, remainder, masters.numel(), SIZE=BLOCK)


def try_out() -> None:
    """RuntimeError, or one of Triton's, where kernels do not run, or compute something else."""
    values = torch.linspace(-3.0, 3.0, 4 * BLOCK, device="cuda")
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    cast_(rounded, values)
    if not torch.equal(rounded, values.to(torch.bfloat16)):
        raise RuntimeError("a kernel has rounded wrongly")


def programs(numel: int) -> tuple[int]:
    """A grid over so many elements, at least one."""
    return (-(-numel // BLOCK),)
