"""Options of groups as ranks compare them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from zeroweave.optim.options import NAMES, Options, difference, packed, shared_options


def optimizer() -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": [second], "step": 7}], lr=0.2)


def both(one: Any, other: Any) -> list[Options]:
    """The options of two ranks that have these learning rates."""
    found = []
    for rate in (one, other):
        given = optimizer()
        given.param_groups[0]["lr"] = rate
        found.append(shared_options(given, {0, 1}))
    return found


def test_what_a_program_sets_is_told_of_the_groups_that_are_shared() -> None:
    found = shared_options(optimizer(), {0, 1})
    assert [found[f"'lr' of param_groups[{index}]"] for index in (0, 1)] == [(0.1,), (0.2,)]
    assert found["'betas' of param_groups[1]"] == (0.9, 0.999)
    assert all(name.split("'")[1] in NAMES for name in found), "counters are the optimizer's own"
    assert not any("param_groups[0]" in name for name in shared_options(optimizer(), {1}))


EQUAL: list[tuple[Any, Any]] = [
    (1, 1.0),
    (True, 1.0),
    (1e-2, np.float64(1e-2)),
    (0.5, np.float32(0.5)),
    (1e-2, torch.tensor(1e-2)),
    ((0.9, 0.95), [0.9, 0.95]),
    (math.nan, float("nan")),
    (math.inf, math.inf),
    (7.402245483234536e-16, 7.402412016688231e-16),
    (0.0, 1.7e-20),
]
IN_PASSING: list[tuple[Any, Any]] = [
    (1e-2, object()),
    (torch.zeros((), device="meta"), 1e-2),
    (0.01234565, math.nextafter(0.01234565, 0)),
    (0.0123456499, 0.0123456501),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (1e-2, 2e-2),
    (1e-2, 1.0001e-2),
    (0.0, 1e-11),
    (1e300, 1e-2),
    ((0.9, 0.95), (0.9, 0.96)),
    ((0.9, 0.95), 0.9),
    ((0.9,), (0.9, 0.9)),
    (math.inf, -math.inf),
    (math.nan, 0.0),
    (torch.tensor(1.0), torch.tensor(2.0)),
    (1, 10**400),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_what_is_equal_looks_alike(one: Any, other: Any) -> None:
    here, there = both(one, other)
    assert packed(here) == packed(there) and difference(here, there) is None


@pytest.mark.parametrize(("one", "other"), IN_PASSING)
def test_what_is_alike_within_the_last_bits_or_cannot_be_compared_is_no_difference(one: Any, other: Any) -> None:
    here, there = both(one, other)
    assert difference(here, there) is None and difference(there, here) is None


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs_is_found(one: Any, other: Any) -> None:
    here, there = both(one, other)
    assert packed(here) != packed(there)
    found = difference(here, there)
    assert found is not None and found[0] == "'lr' of param_groups[0]"


def test_groups_that_another_rank_does_not_have_are_no_difference() -> None:
    there = both(1.0, 1.0)[0]
    here = {name: values for name, values in there.items() if "param_groups[1]" not in name}
    assert difference(here, there) is None and difference(there, here) is None
