"""Lion by its formula, in double precision, and what it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zeroweave import Lion


def by_formula(
    value: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, b1: float, b2: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new = value * (1 - lr * decay) - lr * torch.sign(b1 * momentum + (1 - b1) * gradient)
    return new, b2 * momentum + (1 - b2) * gradient


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_those_of_the_formula(lr: float | torch.Tensor, maximize: bool) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    without = nn.Parameter(torch.randn(2))
    groups: list[dict[str, Any]] = [
        {"params": parameters[:1], "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"params": [parameters[1], without]},
    ]
    optimizer = Lion(groups, lr, maximize=maximize)
    wanted = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in parameters]
    kept = without.detach().clone()
    for _ in range(6):
        for index, (p, more) in enumerate(zip(parameters, [(0.8, 0.95, 0.1), (0.9, 0.99, 0.0)], strict=True)):
            p.grad = torch.randn_like(p)
            signed = -p.grad.double() if maximize else p.grad.double()
            wanted[index] = by_formula(*wanted[index], signed, 0.01, *more)
        assert optimizer.step(lambda: 3.0) == 3.0
    for p, (value, momentum) in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(p.detach().double(), value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-6)
    assert torch.equal(without, kept) and without not in optimizer.state


def test_nan_stays_nan() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([math.nan, 0.0, 2.0])
    Lion([parameter], lr=0.5).step()
    assert parameter[0].isnan() and parameter[1:].tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"lr": -1.0}, "lr is"), ({"betas": (0.9, 1.0)}, "betas are"), ({"weight_decay": -0.1}, "weight_decay is")],
)
def test_numbers_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lion([nn.Parameter(torch.ones(1))], **arguments)


def test_a_state_without_maximize_can_be_loaded() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Lion([parameter])
    state = optimizer.state_dict()
    del state["param_groups"][0]["maximize"]
    optimizer.load_state_dict(state)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.param_groups[0]["maximize"] is False and parameter.item() == pytest.approx(1 - 1e-4)
