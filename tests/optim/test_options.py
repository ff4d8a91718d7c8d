"""Options of groups as ranks compare them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zeroweave.optim.options import Options


def optimizer() -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": [second], "tag": "second"}], lr=0.2)


def test_the_options_of_each_group_are_told() -> None:
    found = Options(optimizer()).comparable()
    assert list(found) == ["param_groups[0]", "param_groups[1]"]
    assert [group["lr"] for group in found.values()] == [0.1, 0.2]
    assert found["param_groups[1]"]["tag"] == "second" and found["param_groups[0]"]["betas"] == [0.9, 0.999]
    assert not any(key.startswith("param") for group in found.values() for key in group)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1e-2, np.float64(1e-2)),
        (0.5, np.float32(0.5)),
        (0.0, -0.0),
        (True, 1),
        ((0.9, 0.95), [0.9, 0.95]),
        (math.nan, float("nan")),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (None, object()),
        (10**400, 10**400),
    ],
)
def test_what_is_equal_looks_alike(one: Any, other: Any) -> None:
    given = optimizer()
    options, found = Options(given), []
    for value in (one, other):
        given.param_groups[0]["lr"] = value
        found.append(repr(options.comparable()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("one", "other"), [(1e-2, math.nextafter(1e-2, 1)), ((0.9, 0.95), (0.9, 0.96)), (math.inf, -math.inf), (None, 0.0)]
)
def test_what_differs_looks_different(one: Any, other: Any) -> None:
    given = optimizer()
    options, found = Options(given), []
    for value in (one, other):
        given.param_groups[0]["lr"] = value
        found.append(repr(options.comparable()))
    assert found[0] != found[1]


def test_what_a_program_adds_later_is_its_own() -> None:
    given = optimizer()
    options = Options(given)
    before = options.comparable()
    given.param_groups[0]["seen"] = 1.0
    assert options.comparable() == before
    del given.param_groups[0]["amsgrad"]
    assert "amsgrad" not in options.comparable()["param_groups[0]"]
