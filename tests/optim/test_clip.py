"""The global norm over shards, and the coefficient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.reference import NORM, ULP, Expected, judge
from zeroweave.optim.scaler import clip_coefficient, total_norm

HOST = torch.device("cpu")


def norm_of(*ranks: list[torch.Tensor]) -> torch.Tensor:
    """The norm of what these ranks have, as the first of them finds it."""
    others = list[torch.Tensor]()
    for tensors in ranks[1:]:
        total_norm(tensors, lambda total: others.append(total.clone()), HOST)
    return total_norm(ranks[0], lambda total: [total.add_(other) for other in others], HOST)


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_coefficient_are_torchs_up_to_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(n, dtype=dtype) for n in (1000, 17, 1, 0, 4096)]
    whole = torch.cat(gradients).double()
    ranks = [gradients[:2], gradients[2:], []]
    norm = norm_of(*ranks)
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
    assert clip_coefficient(norm_of([torch.full((4,), 0.1)]), 1.0).item() == 1.0


def test_bf16_shards_are_not_rounded_to_bf16_on_the_way() -> None:
    gradient = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    assert norm_of([gradient]).item() == pytest.approx(1000**0.5, rel=NORM)


def test_float64_gradients_are_not_narrowed() -> None:
    sent: list[torch.Tensor] = []
    gradients = [torch.full((3,), 1e100, dtype=torch.float64), torch.ones(2)]
    total_norm(gradients, sent.append, HOST)
    assert sent[0].item() == pytest.approx(3e200, rel=1e-15)
    total_norm([gradients[0] * 1e100], sent.append, HOST)
    assert sent[1].item() == float("inf"), "as 3e400 is in float64"


def test_norms_beyond_the_range_of_squares() -> None:
    local = [torch.tensor([1e18, 1e18]), torch.tensor([1e18]).repeat(200)]
    norm = norm_of(*[local] * 1000).item()
    assert norm == pytest.approx(1e18 * (202 * 1000) ** 0.5, rel=2 * ULP)  # 1e18 is no fp32 number either


def test_not_finite_gradients_show() -> None:
    for value in (float("inf"), float("nan")):
        assert not torch.isfinite(norm_of([torch.tensor([1.0, value])]))


def test_nothing_is_zero() -> None:
    assert norm_of([]).item() == 0.0
