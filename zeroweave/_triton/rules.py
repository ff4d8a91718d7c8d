"""One pass over a range of a shard: gradient, master and moments in; master and moments out.

The arithmetic is float32, in the order of `torch.optim`'s implementations for lists of tensors, each result within a
unit of the last place of theirs; Lion's are the bits of `optim.lion`. What a step has of one value each is computed in
double precision on the host, and handed in.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from zeroweave._triton import CHANCES, CODED_BLOCK, LEAST_SCALE
from zeroweave._triton.masters import BLOCK, bits_of, joined, noise, of_24_bits, programs, shard_of

__all__ = ["BLOCK", "adagrad", "adam", "compact_adam", "lion", "programs", "sgd"]

PER_SCALE: Final = tl.constexpr(CODED_BLOCK)
"""Elements of a block of moments in 8 bits, see `optim.quantize8`. A kernel has some whole blocks, [blocks, 64]."""
_LEAST: Final = tl.constexpr(LEAST_SCALE)
_CHANCES: Final = tl.constexpr(CHANCES)
_CHANCE: Final = tl.constexpr(1 / CHANCES)


@triton.jit
def _master(master, remainder, at, there, SPLIT: tl.constexpr):
    if SPLIT:
        values = joined(tl.load(master + at, there), tl.load(remainder + at, there), 0)
    else:
        values = tl.load(master + at, there)
    return values


@triton.jit
def _keep(values, master, remainder, at, there, SPLIT: tl.constexpr):
    if SPLIT:
        bits = bits_of(values)
        tl.store(master + at, shard_of(bits), there)
        tl.store(remainder + at, bits.to(tl.int16), there)
    else:
        tl.store(master + at, values, there)


@triton.jit
def _gradient(gradient, factor, at, there, FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr):
    values = tl.load(gradient + at, there).to(tl.float32)
    if FACTOR == 1:
        values = values * factor
    if FACTOR == 2:
        values = values * tl.load(factor)
    if MAXIMIZE:
        values = -values
    return values


@triton.jit
def _there(numel, SIZE: tl.constexpr):
    """The indices of the elements of this program, and which of them exist."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return at, at < numel


@triton.jit
def adam(
    master,
    remainder,
    gradient,
    average,
    square,
    largest,
    factor,
    numel,
    keep,
    size,
    root,
    decay,
    rest1,
    beta2,
    rest2,
    eps,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    COUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Adam, and AdamW where not COUPLED; `rest1`, `rest2`: 1 - beta1, 1 - beta2."""
    at, there = _there(numel, SIZE)
    values = _master(master, remainder, at, there, SPLIT)
    grad = _gradient(gradient, factor, at, there, FACTOR, MAXIMIZE)
    if COUPLED:
        grad = grad + decay * values
    else:
        values = values * keep
    first, second = tl.load(average + at, there), tl.load(square + at, there)
    first = first + rest1 * (grad - first)
    second = second * beta2 + rest2 * (grad * grad)
    tl.store(average + at, first, there)
    tl.store(square + at, second, there)
    if AMSGRAD:
        second = tl.maximum(tl.load(largest + at, there), second)
        tl.store(largest + at, second, there)
    width = tl.div_rn(tl.sqrt_rn(second), root) + eps
    _keep(values - size * tl.div_rn(first, width), master, remainder, at, there, SPLIT)


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


@triton.jit(do_not_specialize=["step"])
def compact_adam(
    master,
    remainder,
    gradient,
    average,
    square,
    averages,
    squares,
    factor,
    numel,
    keep,
    size,
    root,
    decay,
    rest1,
    beta2,
    rest2,
    eps,
    position,
    step,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    COUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """`adam` with codes for moments, whose scales are `averages` and `squares`, and masters of 24 bits.

    The range begins with a block, at `position` of the flat.
    """
    tl.static_assert(SPLIT)
    block = tl.program_id(0).to(tl.int64) * (SIZE // PER_SCALE) + tl.arange(0, SIZE // PER_SCALE)
    at = block[:, None] * PER_SCALE + tl.arange(0, PER_SCALE)[None, :]
    some, there = block * PER_SCALE < numel, at < numel
    random = noise(position + at, step)
    values = joined(tl.load(master + at, there), tl.load(remainder + at, there), 8)
    grad = _gradient(gradient, factor, at, there, FACTOR, MAXIMIZE)
    if COUPLED:
        grad = grad + decay * values
    else:
        values = values * keep
    first = first_of(tl.load(average + at, there), tl.load(averages + block, some))
    second = second_of(tl.load(square + at, there), tl.load(squares + block, some))
    first = first + rest1 * (grad - first)
    second = second * beta2 + rest2 * (grad * grad)
    scales = scales_of(first, there)
    tl.store(average + at, first_codes(first, scales), there)
    tl.store(averages + block, scales, some)
    scales = scales_of(second, there)
    tl.store(square + at, second_codes(second, scales, random), there)
    tl.store(squares + block, scales, some)
    width = tl.div_rn(tl.sqrt_rn(second), root) + eps
    bits = of_24_bits(bits_of(values - size * tl.div_rn(first, width)), random & 0xFF)
    tl.store(master + at, shard_of(bits), there)
    tl.store(remainder + at, (bits >> 8).to(tl.int8), there)


@triton.jit
def sgd(
    master,
    remainder,
    gradient,
    buffer,
    factor,
    numel,
    rate,
    decay,
    momentum,
    undamped,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """SGD; `undamped`: 1 - dampening. FIRST: there is no momentum yet."""
    at, there = _there(numel, SIZE)
    values = _master(master, remainder, at, there, SPLIT)
    grad = _gradient(gradient, factor, at, there, FACTOR, MAXIMIZE)
    if DECAY:
        grad = grad + decay * values
    if MOMENTUM:
        moved = grad if FIRST else tl.load(buffer + at, there) * momentum + undamped * grad
        tl.store(buffer + at, moved, there)
        grad = grad + momentum * moved if NESTEROV else moved
    _keep(values - rate * grad, master, remainder, at, there, SPLIT)


@triton.jit
def adagrad(
    master,
    remainder,
    gradient,
    total,
    factor,
    numel,
    rate,
    decay,
    eps,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Adagrad; `rate`: as it has fallen."""
    at, there = _there(numel, SIZE)
    values = _master(master, remainder, at, there, SPLIT)
    grad = _gradient(gradient, factor, at, there, FACTOR, MAXIMIZE)
    if DECAY:
        grad = grad + decay * values
    added = tl.load(total + at, there) + grad * grad
    tl.store(total + at, added, there)
    _keep(values - rate * tl.div_rn(grad, tl.sqrt_rn(added) + eps), master, remainder, at, there, SPLIT)


@triton.jit
def lion(
    master,
    remainder,
    gradient,
    average,
    factor,
    numel,
    keep,
    rate,
    beta1,
    rest1,
    beta2,
    rest2,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Lion; `keep`: 1 - rate * decay, `rest…`: 1 - beta."""
    at, there = _there(numel, SIZE)
    values = _master(master, remainder, at, there, SPLIT)
    grad = _gradient(gradient, factor, at, there, FACTOR, MAXIMIZE)
    moved = tl.load(average + at, there)
    mixed = moved * beta1 + grad * rest1
    sign = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, mixed))  # 0 and NaN are their own
    tl.store(average + at, moved * beta2 + grad * rest2, there)
    _keep(values * keep - sign * rate, master, remainder, at, there, SPLIT)
