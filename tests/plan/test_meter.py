"""What is alive is counted, and what takes time is told to the clock."""

from __future__ import annotations

import pytest
import torch

from zeroweave._torch.fake import without_memory
from zeroweave.plan.hardware import GPUS, Efficiency, Hardware
from zeroweave.plan.meter import Meter, PlannedClock

HARDWARE = Hardware(GPUS["h200"], Efficiency())


def test_a_storage_counts_until_nobody_views_it() -> None:
    clock = PlannedClock()
    with without_memory(), Meter(clock, HARDWARE):
        x = torch.empty(1024)
        assert clock.allocated() == 4096
        y = x.view(32, 32)[1:]
        del x
        assert clock.allocated() == 4096 and clock.now == 0.0
        z = y + 1
        assert clock.allocated() == 4096 + z.nbytes
        assert clock.now == pytest.approx(HARDWARE.compute(0, y.nbytes + z.nbytes, 4))
        del y
        assert clock.allocated() == z.nbytes
        del z
        assert clock.allocated() == 0 and clock.peak() == 4096 + 4096 - 128
