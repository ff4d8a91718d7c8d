"""Random numbers of steps that are only tried out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import zeroweave as zw


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("fails", [False, True])
def test_whatever_draws_them_goes_on_as_if_nothing_had_been_tried_out(fails: bool) -> None:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with zw.initialize(module, optimizer, {"compile": {"enabled": False}}) as engine:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        expected = [drawn() for _ in range(3)]
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        found = [drawn()]
        try:
            with engine.profiling():
                for _ in range(2):
                    engine.backward(engine(torch.rand(2, 4) * sum(drawn())).sum())
                    engine.step()
                if fails:
                    raise KeyError
        except KeyError:
            engine.zero_grad()
        assert [*found, drawn(), drawn()] == expected
