"""How float32 masters become bfloat16, and how the two together are as good as the master.

A master is rounded to the nearest bfloat16; of two equally near ones to that farther from zero. To do so, half a unit
of the last place is added to its bits, and the low 16 are cut off. The rounded value and those low 16 bits, the
remainder, give the master back, bit by bit: where the remainder's highest bit is set, a unit was carried. Rounding to
even could not be undone so: an even bfloat16 is then the nearest one of 65,537 float32.

The remainder may have the upper 8 of those 16 bits alone. The master is rounded to these first: to the nearest, or up
or down by chance, see `noise_`. A master whose lower 8 bits are zero stays unchanged with any noise.

A NaN becomes the one of the highest mantissa bit alone: of some others, half a unit more is zero.
"""

from __future__ import annotations

from typing import Final

import torch

from zeroweave._triton import kernels

_AT_ONCE: Final = 1 << 22
"""Elements at a time: intermediate results take some bytes of each."""
_NAN: Final = 0x7FC0_0000

# Of the hash: odd numbers below 2^31, whose bits look random, so that each bit of the result depends on all of them.
_WORD: Final = 0xFFFF_FFFF
_OF_POSITION: Final = 0x1E35_A7BD
_OF_STEP: Final = 0x5BD1_E995
_MIXED: Final = ((16, 0x7FEB_352D), (15, 0x46CA_68B5))

_LIBRARY: Final = torch.library.Library("zeroweave", "FRAGMENT")


@torch.no_grad()
def cast_(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Overwrites `target` with `values` of the same shape, rounded as above where bfloat16 is made of float32."""
    if (target.dtype, values.dtype) != (torch.bfloat16, torch.float32):
        return target.copy_(values)
    if (fast := kernels("masters", values.device.type)) is not None:
        fast.cast_(target, values.contiguous())
        return target
    torch.ops.zeroweave.round_(target, values)
    return target


def _round(target: torch.Tensor, values: torch.Tensor) -> None:
    """`cast_` if there is no kernel.

    An operator, so that a plan sees what a kernel does: one pass, and no memory on the way.
    """
    for part, of in zip(target.view(-1).split(_AT_ONCE), values.reshape(-1).split(_AT_ONCE), strict=True):
        part.view(torch.int16).copy_(_carried(_bits(of)) >> 16)


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in a dtype; themselves if they have it."""
    return values if values.dtype == dtype else cast_(torch.empty_like(values, dtype=dtype), values)


@torch.no_grad()
def split_(
    masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor, random: torch.Tensor | None = None
) -> None:
    """Overwrites `shard`, bfloat16, and `remainder`, int16 or int8, with what together are `masters`, float32; all [n].

    `random`, int32 [n], as of `noise_`: what an int8 has no room for is rounded by it; None: to the nearest.
    """
    if (fast := kernels("masters", masters.device.type)) is not None:
        fast.split_(masters, shard, remainder, random)
        return
    missing = _missing(remainder)
    parts = (tensor.split(_AT_ONCE) for tensor in (masters, shard, remainder))
    for index, (values, high, low) in enumerate(zip(*parts, strict=True)):
        bits = _bits(values)
        if missing:
            own = None if random is None else random[index * _AT_ONCE :][: bits.numel()] & 0xFF
            bits = (bits + (0x80 if own is None else own)) & ~0xFF
        high.view(torch.int16).copy_(_carried(bits) >> 16)
        low.copy_(bits >> missing)


@torch.no_grad()
def join_(masters: torch.Tensor, shard: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Overwrites `masters`, float32, with what `split_` has made `shard` and `remainder` of; all [n]."""
    if (fast := kernels("masters", masters.device.type)) is not None:
        fast.join_(masters, shard, remainder)
        return masters
    missing = _missing(remainder)
    parts = (tensor.split(_AT_ONCE) for tensor in (masters, shard, remainder))
    for values, high, low in zip(*parts, strict=True):
        bits = low.to(torch.int32) << missing
        carry = bits >> 15  # -1 or 0
        values.view(torch.int32).copy_((carry.add_(high.view(torch.int16)) << 16) | (bits & 0xFFFF))
    return masters


@torch.no_grad()
def noise_(random: torch.Tensor, position: int, step: torch.Tensor | int) -> torch.Tensor:
    """Overwrites `random`, int32 [n], with random bits for the elements from `position` on, at step `step`.

    They are a hash of both: the same for the same position and step, on any rank. Values that are
    rounded up with the probability of the part that is cut off are right on average, even if each step changes less
    than their last place.
    """
    step = step.to(random.device, torch.int64) if isinstance(step, torch.Tensor) else step
    for index, part in enumerate(random.split(_AT_ONCE)):
        first = position + index * _AT_ONCE
        bits = torch.arange(first, first + part.numel(), device=part.device)
        bits = (bits * _OF_POSITION + step * _OF_STEP) & _WORD
        for shift, factor in _MIXED:
            bits = ((bits ^ (bits >> shift)) * factor) & _WORD
        part.copy_(bits ^ (bits >> 16))
    return random


def _missing(remainder: torch.Tensor) -> int:
    """How many of the low 16 bits a remainder has no room for."""
    return 16 - 8 * remainder.itemsize


def _bits(values: torch.Tensor) -> torch.Tensor:
    """int32; all NaNs are one."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(values.isnan(), _NAN, bits)


def _carried(bits: torch.Tensor) -> torch.Tensor:
    return bits + 0x8000


_LIBRARY.define("round_(Tensor(a!) target, Tensor values) -> ()")
_LIBRARY.impl("round_", _round, "CompositeExplicitAutograd")
_LIBRARY.impl("round_", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("zeroweave::round_", lambda target, values: None, lib=_LIBRARY)
