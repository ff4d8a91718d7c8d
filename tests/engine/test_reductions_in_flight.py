"""How many reductions are in flight at once, with a schedule and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from zeroweave.schedule import Reduce, Settle


def in_flight(engine: Any) -> int:
    """The most of one step."""
    flying = most = 0
    for instruction in engine.executed:
        flying += isinstance(instruction, Reduce) - isinstance(instruction, Settle)
        most = max(most, flying)
    return most


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_reductions_on_demand_follow_the_settings_too(stage: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
    config = {"stage": stage, "compile": {"enabled": False}, "reduce": {"depth": 4}}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        engine.reschedule(depth=3)
        step(engine)  # without a schedule
        assert in_flight(engine) == 3
        step(engine)
        assert in_flight(engine) == 3
        engine.reschedule(depth=1)
        step(engine)
        assert in_flight(engine) == 1
