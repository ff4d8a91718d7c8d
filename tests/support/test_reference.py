"""The reference itself: what the bound allows, and that float64 is float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.marks import slow
from tests.support.models import entry
from tests.support.reference import ULP, Exactly, Expected, Plain, build, judge, judge_numbers, rounded
from tests.support.zoo import WIDTH, rows

NEAR = {1.0: 1.0, 1.00390625: 1.0078125, -1.00390625: -1.0078125, 1.01171875: 1.015625, 1.0039: 1.0, 0.0: 0.0}
"""Numbers, and the bfloat16 that masters become: 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway between two."""


def test_low_precision_is_the_nearest_and_away_from_zero_halfway() -> None:
    values = torch.tensor(list(NEAR))
    assert torch.equal(rounded(values, torch.bfloat16).float(), torch.tensor(list(NEAR.values())))
    many = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(many, torch.bfloat16), many.bfloat16())
    assert torch.equal(rounded(many, torch.float16), many.half())


EXACT: dict[str, Tensor | None] = {
    "a": torch.ones(100, dtype=torch.float64),
    "b": torch.full((4,), 2.0, dtype=torch.float64),
    "noise": torch.full((4,), 1e-9, dtype=torch.float64),
    "absent": None,
}


def off(relative: float, *names: str) -> dict[str, Tensor | None]:
    """The exact tensors, those named with an error of that part of their norm."""
    return {n: v if v is None else v * (1 + relative * (n in names)) for n, v in EXACT.items()}


EXPECTED = Expected(off(1e-6, "a"), EXACT)


@pytest.mark.parametrize(
    ("got", "used"),
    [
        (EXACT, 0.0),
        (off(1e-6, "a"), 1e-6 / (2e-6 + ULP)),
        (off(2e-6, "a"), 2e-6 / (2e-6 + ULP)),
        (off(4e-6, "a"), 4e-6 / (2e-6 + ULP)),
        (off(ULP, "b"), 1.0),  # plain PyTorch has no error there, nor has the median tensor: one ulp is left
        (off(2 * ULP, "b"), 2.0),
        (off(float("nan"), "a"), float("inf")),
        ({**EXACT, "a": None}, float("inf")),
        ({**EXACT, "a": torch.ones(50)}, float("inf")),
        ({**EXACT, "absent": torch.zeros(2)}, float("inf")),
        ({**EXACT, "a": torch.zeros(100)}, 1 / (2e-6 + ULP)),
        ({**EXACT, "noise": torch.zeros(4)}, 2e-9 / (ULP * 1e-3 * 4)),  # against a thousandth of the median norm
    ],
)
def test_the_part_of_the_allowed_error(got: dict[str, Any], used: float) -> None:
    assert judge(got, EXPECTED)[0] == pytest.approx(used, rel=1e-3)


def test_a_tensor_that_plain_pytorch_has_right_by_luck_is_held_to_what_others_lose() -> None:
    exact = {name: torch.ones(4, dtype=torch.float64) for name in "abc"}
    plain = {**exact, "a": 1.000001 * exact["a"], "b": 1.000001 * exact["b"]}
    assert judge({**exact, "c": 1.000002 * exact["c"]}, Expected(plain, exact))[0] <= 1
    assert judge({**exact, "c": 1.000003 * exact["c"]}, Expected(plain, exact))[0] > 1


def test_numbers_are_judged_as_one_tensor() -> None:
    exact = [3.0, 4.0]
    assert judge_numbers([3.0, 4.0 + 9e-7], ([3.0, 4.0 + 3e-7], exact))[0] <= 1
    assert judge_numbers([3.0, 4.0 + 5e-6], ([3.0, 4.0 + 3e-7], exact))[0] > 1


class Narrow(nn.Module):
    """Asks for fp32 as models do that run in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.softmax((x @ self.weight).float(), dim=-1, dtype=torch.float32).to(torch.float32)
        return F.dropout(h, 0.5) * torch.ones(WIDTH, dtype=torch.float32)


def test_what_asks_for_fp32_gets_float64() -> None:
    """And the same dropout masks, from fp32 inputs as well."""
    torch.manual_seed(0)
    plain = Plain(Narrow())
    narrow, wide = plain.each(lambda net, x: net(x), rows(0, 0)[0])
    assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
    assert torch.equal(narrow == 0, wide == 0) and 0 < (wide == 0).float().mean() < 1
    found = judge({"y": wide.float()}, Expected.alone({"y": wide}))
    assert 0 < found[0] <= 1, "nothing was rounded to fp32 on the way"
    with Exactly():
        assert plain.nets[1](rows(0, 0)[0]).dtype == torch.float64


@slow("hf_qwen3")
@pytest.mark.parametrize("name", ["mlp", "decoder", "lstm", "hf_qwen3"])
def test_float64_differs_from_fp32_by_roundings_only(name: str) -> None:
    model = entry(name)
    plain = Plain(build(model))
    batch = model.batch(0, 0)
    plain.each(lambda net, batch: model.micro(net, net, batch, Tensor.backward), batch)
    gradients = plain.gradients()
    for key, value in gradients.exact.items():
        assert value is not None and value.dtype == torch.float64
        rounded = gradients.plain[key]
        assert rounded is not None
        error = (rounded.double() - value).norm() / value.norm()
        assert 0 < error < 1e-4, (key, error)
