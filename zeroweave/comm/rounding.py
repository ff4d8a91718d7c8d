"""How float32 masters become bfloat16, and how the two together are as good as the master.

A master is rounded to the nearest bfloat16; of two equally near ones to that farther from zero. To do so, half a unit
of the last place is added to its bits, and the low 16 are cut off. The rounded value and those low 16 bits, the
remainder, give the master back, bit by bit: where the remainder's highest bit is set, a unit was carried. Rounding to
even could not be undone so: an even bfloat16 is then the nearest one of 65,537 float32.

A NaN becomes the one of the highest mantissa bit alone: of some others, half a unit more is zero.
"""

from __future__ import annotations

from typing import Final

import torch

from zeroweave._triton import kernels

_AT_ONCE: Final = 1 << 22
"""Elements: what is made on the way takes some bytes of each."""
_NAN: Final = 0x7FC0_0000


@torch.no_grad()
def cast_(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Overwrites `target` with `values` of the same shape, rounded as above where bfloat16 is made of float32."""
    if (target.dtype, values.dtype) != (torch.bfloat16, torch.float32):
        return target.copy_(values)
    if (fast := kernels("masters", values.device.type)) is not None:
        fast.cast_(target, values.contiguous())
        return target
    for part, of in zip(target.view(-1).split(_AT_ONCE), values.reshape(-1).split(_AT_ONCE), strict=True):
        part.view(torch.int16).copy_(_carried(_bits(of)) >> 16)
    return target


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in a dtype; themselves if they have it."""
    return values if values.dtype == dtype else cast_(torch.empty_like(values, dtype=dtype), values)


@torch.no_grad()
def split_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> None:
    """Overwrites `shard`, bfloat16, and `remainder`, int16, with what together are `masters`, float32; all [n]."""
    if (fast := kernels("masters", masters.device.type)) is not None:
        fast.split_(masters, shard, remainder)
        return
    parts = (tensor.split(_AT_ONCE) for tensor in (masters, shard, remainder))
    for values, high, low in zip(*parts, strict=True):
        bits = _bits(values)
        high.view(torch.int16).copy_(_carried(bits) >> 16)
        low.copy_(bits)


@torch.no_grad()
def join_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Overwrites `masters`, float32, with what `split_` has made `shard` and `remainder` of; all [n]."""
    if (fast := kernels("masters", masters.device.type)) is not None:
        fast.join_(masters, shard, remainder)
        return masters
    parts = (tensor.split(_AT_ONCE) for tensor in (masters, shard, remainder))
    for values, high, low in zip(*parts, strict=True):
        bits = low.to(torch.int32)
        carry = bits >> 15  # -1 or 0
        values.view(torch.int32).copy_((carry.add_(high.view(torch.int16)) << 16) | (bits & 0xFFFF))
    return masters


def _bits(values: torch.Tensor) -> torch.Tensor:
    """int32; all NaNs are one."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(values.isnan(), _NAN, bits)


def _carried(bits: torch.Tensor) -> torch.Tensor:
    return bits + 0x8000
