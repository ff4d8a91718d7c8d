"""float32 to bfloat16, and back with the remainder: every kind of bits that a float32 can have."""

from __future__ import annotations

from typing import Any

import torch

from zeroweave._torch.modes import OperatorMode, fake_tensors, operator_name
from zeroweave.comm.rounding import cast, cast_, join_, split_


def floats() -> torch.Tensor:
    """float32 of all exponents and signs, with each low half that rounding looks at."""
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], dtype=torch.int32)
    return (high.unsqueeze(1) | low).flatten().view(torch.float32)


def parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shard, remainder = (torch.empty(values.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    split_(values, shard, remainder)
    return shard, remainder


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def test_a_master_comes_back_bit_by_bit() -> None:
    values = floats()
    back, numbers = join_(torch.empty_like(values), *parts(values)), ~values.isnan()
    assert bits(back)[numbers].equal(bits(values)[numbers])
    assert torch.equal(back.isnan(), values.isnan())


def test_the_shard_is_the_nearest_and_of_two_the_farther_from_zero() -> None:
    values = floats()
    shard, even = parts(values)[0], values.to(torch.bfloat16)
    assert torch.equal(shard.isnan(), values.isnan())
    tie = (bits(values) & 0xFFFF == 0x8000) & ~values.isnan()
    assert shard[~tie & ~values.isnan()].equal(even[~tie & ~values.isnan()]), "where one is nearest all agree"
    farther = shard[tie].float().abs() - values[tie].abs()
    assert (farther > 0).all(), "infinity is beyond the largest"


def test_a_cast_rounds_as_a_split_does() -> None:
    values = floats()
    shard, _ = parts(values)
    numbers = ~values.isnan()
    assert cast(values, torch.bfloat16)[numbers].equal(shard[numbers])
    assert cast(values.view(-1, 7), torch.bfloat16).view(-1)[numbers].equal(shard[numbers])
    assert cast(values, torch.float32) is values
    assert cast(values, torch.float16)[numbers].equal(values.to(torch.float16)[numbers])
    grown = torch.zeros(len(values), dtype=torch.float32)
    assert cast_(grown, shard)[numbers].equal(shard.float()[numbers])


def test_a_plan_sees_one_operator_however_many_elements_there_are() -> None:
    """Otherwise a plan of a large model takes minutes, and counts memory that no kernel takes."""
    seen: list[str] = []

    class Seen(OperatorMode):
        def ran(self, operator: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            seen.append(operator_name(operator))

    with fake_tensors():
        values = torch.empty(1 << 26)
        target = torch.empty_like(values, dtype=torch.bfloat16)
        with Seen():
            cast_(target, values)
    assert seen == ["round_"]
