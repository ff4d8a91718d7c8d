"""What several tests of parameters begin with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parameters.resting import Resting, make_resting


@pytest.fixture
def resting() -> Resting:
    torch.manual_seed(0)
    return make_resting(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)))
