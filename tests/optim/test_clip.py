"""The global norm over shards, and the coefficient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.reference import NORM, ULP, Expected, judge
from zeroweave._torch.foreach import foreach_norms
from zeroweave.optim.scaler import clip_coefficient, sum_of_squares, total_norm


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_coefficient_are_torchs_up_to_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(n, dtype=dtype) for n in (1000, 17, 1, 0, 4096)]
    whole = torch.cat(gradients).double()
    ranks = [gradients[:2], gradients[2:], []]
    squares = [sum_of_squares(foreach_norms(tensors)) for tensors in ranks]
    norm = total_norm(squares[0], lambda total: total.add_(squares[1]).add_(squares[2]))
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert norm.item() == pytest.approx(whole.norm().item(), rel=NORM)

    parameters = [nn.Parameter(torch.zeros(n)) for n in (1000, 17, 1, 0, 4096)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.float().clone()
    nn.utils.clip_grad_norm_(parameters, 2.0)
    exact = whole.norm()
    coefficient = float(2.0 / (exact + 1e-6))
    for index, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True)):
        ours, wanted = gradient.float() * clip_coefficient(norm, 2.0), gradient.double() * coefficient
        found = judge({"": ours}, Expected({"": parameter.grad}, {"": wanted}))
        assert found[0] <= 1, (index, found)


def test_small_norms_are_left_alone() -> None:
    gradients = [torch.full((4,), 0.1)]
    coefficient = clip_coefficient(total_norm(sum_of_squares(foreach_norms(gradients)), lambda _: None), 1.0)
    assert coefficient.item() == 1.0


def test_bf16_shards_are_not_rounded_to_bf16_on_the_way() -> None:
    gradient = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    assert total_norm(sum_of_squares(foreach_norms([gradient])), lambda _: None).item() == pytest.approx(
        1000**0.5, rel=NORM
    )


def test_float64_gradients_are_not_narrowed() -> None:
    gradients = [torch.full((3,), 1e200, dtype=torch.float64), torch.ones(2)]
    assert sum_of_squares(foreach_norms(gradients[:1])).item() == pytest.approx(float("inf"))  # as 3e400 is in float64
    gradients[0] *= 1e-100
    assert sum_of_squares(foreach_norms(gradients)).item() == pytest.approx(3e200, rel=1e-15)


def test_norms_beyond_the_range_of_squares() -> None:
    local = sum_of_squares(foreach_norms([torch.tensor([1e18, 1e18]), torch.tensor([1e18]).repeat(200)]))
    norm = total_norm(local * 1000, lambda _: None).item()
    assert norm == pytest.approx(1e18 * (202 * 1000) ** 0.5, rel=2 * ULP)  # 1e18 is no fp32 number either


def test_not_finite_gradients_show() -> None:
    for value in (float("inf"), float("nan")):
        norm = total_norm(sum_of_squares(foreach_norms([torch.tensor([1.0, value])])), lambda _: None)
        assert not torch.isfinite(norm)


def test_nothing_is_zero() -> None:
    assert sum_of_squares(foreach_norms([])).item() == 0.0
    assert sum_of_squares([], torch.device("cpu")).dtype == torch.float64


def test_total_leaves_the_local_value_alone() -> None:
    local = sum_of_squares(foreach_norms([torch.ones(4)]))
    assert total_norm(local, lambda total: total.add_(5.0)).item() == 3.0
    assert local.item() == 4.0
