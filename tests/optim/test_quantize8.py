"""Moments as codes, masters of 24 bits, and the noise that rounds both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zeroweave.comm.rounding import join_, noise_, split_
from zeroweave.optim.quantize8 import BLOCK, Coded, decode, encode_

KINDS = (torch.int8, torch.uint8)


def noise(numel: int, step: int, position: int = 0) -> Tensor:
    return noise_(torch.empty(numel, dtype=torch.int32), position, step)


def coded(values: Tensor, kind: torch.dtype, random: Tensor | None = None) -> Coded:
    made = Coded.zeros(values.numel(), kind, values.device)
    encode_(made, values, random)
    return made


def moments(kind: torch.dtype, blocks: int = 64, seed: int = 0) -> Tensor:
    """Blocks from the least float32 to large ones, each over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(blocks, BLOCK, generator=generator) * torch.exp2(
        -20 * torch.rand(blocks, BLOCK, generator=generator)
    )
    values = (shares * torch.exp2(torch.linspace(-148, 120, blocks)).unsqueeze(1)).view(-1)
    return values if kind == torch.int8 else values.abs()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_code_means_is_coded_as_that_code(kind: torch.dtype) -> None:
    info = torch.iinfo(kind)
    codes = torch.arange(info.min + (kind == torch.int8), info.max + 1).to(kind)
    largest = codes[-1:]
    blocks = torch.cat([torch.cat([part, largest.expand(BLOCK - part.numel())]) for part in codes.split(BLOCK - 1)])
    for scale in [2.0**-94, 1e-20, 1.0, 1 / 3, math.pi * 1e10, 3e38]:
        held = Coded(blocks, torch.full((blocks.numel() // BLOCK,), scale))
        values = decode(held)
        for random in (None, *(noise(values.numel(), step) for step in range(20))):
            again = coded(values, kind, random)
            assert torch.equal(again.codes, held.codes) and torch.equal(again.scales, held.scales)
    for seed in range(5):
        held = coded(moments(kind, seed=seed), kind, noise(64 * BLOCK, seed))
        again = coded(decode(held), kind, noise(64 * BLOCK, seed + 1))
        assert torch.equal(again.codes, held.codes) and torch.equal(again.scales, held.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_between_their_neighbours(kind: torch.dtype) -> None:
    values = moments(kind)
    found, blocks = decode(coded(values, kind)), values.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-94)
    shares, ours = (blocks / largest).double(), (found.view(-1, BLOCK) / largest).double()
    power, top = (2, 127) if kind == torch.int8 else (4, 255)
    away = (shares.abs() ** (1 / power) - ours.abs() ** (1 / power)).abs() * top
    lifted = (kind == torch.uint8) & (shares < top**-power)  # to the least code: never to zero
    assert float(away[~lifted].max() if isinstance(lifted, Tensor) else away.max()) <= 0.501
    assert torch.equal(found.view(-1, BLOCK).abs().amax(1, keepdim=True)[16:], largest[16:]), "the largest is exact"
    if kind == torch.uint8:
        assert bool(((found > 0) == (values > 0)).all()), "no root of zero below an update"
    assert not decode(coded(torch.zeros(BLOCK), kind)).any()


def test_second_moments_get_where_they_should() -> None:
    """Averages of one value, begun at twice and at half of it: the nearest codes stay there."""
    start = torch.cat([torch.full((512,), 2e-3), torch.full((512,), 0.5e-3)])
    start[::BLOCK] = 1.0
    ends = []
    for by_chance in (True, False):
        held = coded(start, torch.uint8)
        for step in range(300):
            values = decode(held)
            values = torch.where(values == 1.0, values, 0.999 * values + 0.001 * 1e-3)
            encode_(held, values, noise(1024, step) if by_chance else None)
        ends.append([float(half[half < 1].mean()) for half in decode(held).split(512)])
    left = 0.999**300
    assert ends[0] == pytest.approx([1e-3 * (1 + left), 1e-3 * (1 - left / 2)], rel=0.02)
    assert ends[1] == pytest.approx([2e-3, 0.5e-3], rel=0.05), "if the nearest codes did it, noise would be for nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(kind: torch.dtype, value: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = value
    for random in (None, noise(2 * BLOCK, 1)):
        found = decode(coded(values, kind, random))
        assert found[:BLOCK].isnan().all() and torch.equal(found[BLOCK:], values[BLOCK:])


# ---------------------------------------------------------------------- masters
def master_of(values: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shard, rest = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int8)
    split_(values, shard, rest, random)
    return join_(torch.empty_like(values), shard, rest), shard


def test_masters_keep_24_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 16, generator=generator) * torch.exp2(
        torch.randint(-100, 100, (1 << 16,), generator=generator).float()
    )
    values[:4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    master, shard = master_of(values)
    bits, wanted = master.view(torch.int32), values.view(torch.int32)
    assert not (bits & 0xFF).any() and int((bits - wanted).abs().max()) <= 0x80
    assert torch.equal(shard.view(torch.int16), ((bits + 0x8000) >> 16).to(torch.int16))
    for step in range(8):
        again, same = master_of(master, noise(1 << 16, step))
        assert torch.equal(again.view(torch.int32), bits) and torch.equal(same, shard)
    assert master_of(torch.full((4,), math.nan))[0].isnan().all()


def test_masters_are_rounded_by_chance_without_bias() -> None:
    """Each of 256 rests over 256 steps, whose mean has a deviation of 8 at most, and all together."""
    rests = torch.arange(256, dtype=torch.int32)
    values = (0x3F800000 + rests).view(torch.float32).repeat(256)
    bits = torch.cat([noise(256, step) for step in range(256)])
    moved = master_of(values, bits)[0].view(torch.int32) - 0x3F800000
    assert set(moved.unique().tolist()) <= {0, 0x100}
    away = moved.view(256, 256).double().mean(0) - rests
    assert float(away.abs().max()) < 5 * 8 and abs(float(away.mean())) < 5 * 8 / 16


# ---------------------------------------------------------------------- noise
def test_noise_belongs_to_elements_and_steps() -> None:
    whole = noise(1000, 7)
    assert torch.equal(whole[300:], noise(700, 7, 300)) and torch.equal(
        whole, noise_(whole.clone(), 0, torch.tensor(7.0))
    )
    assert not torch.equal(whole, noise(1000, 8))
    assert not torch.equal(noise(64, 1, 2**32 + 5), noise(64, 1, 4))


def test_noise_looks_random() -> None:
    draws = torch.stack([noise(4096, step) for step in range(256)])
    for shift in (0, 8):
        found = ((draws >> shift) & 0xFF).double()
        assert abs(float(found.mean()) - 127.5) < 5 * 74 / 1024
        counts = torch.bincount(found.view(-1).long(), minlength=256).double()
        assert float(((counts - 4096).square() / 4096).sum()) < 256 + 5 * math.sqrt(512), "each byte is as frequent"
        for lag in (1, 2, 64, 128):
            for one, other in ((found[:, lag:], found[:, :-lag]), (found[lag:], found[:-lag])):
                together = torch.corrcoef(torch.stack([one.reshape(-1), other.reshape(-1)]))[0, 1]
                assert abs(float(together)) < 5 / math.sqrt(one.numel()), (shift, lag)
