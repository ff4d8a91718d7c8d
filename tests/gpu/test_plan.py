"""GPUs are measured for plans, all of what a plan goes by."""

from __future__ import annotations

import pytest

from zeroweave.plan.calibrate import measured
from zeroweave.plan.hardware import GPUS


@pytest.mark.gpus(2)
def test_two_gpus_are_measured() -> None:
    found = measured(2)
    assert found.rates.keys() == {"matmul", "attention", "memory", "host", "inside"}
    assert found.seconds.keys() == {"kernel", "launch"}
    assert all(rate > 0 for rate in found.rates.values())
    assert 0 < found.seconds["kernel"] < 1e-4
    if found.gpu is not None:
        found.efficiency(GPUS[found.gpu])  # no rate is above the data sheet's
