"""What is alive is counted, and what takes time is told to the clock, on the lane that it takes it from."""

from __future__ import annotations

import pytest
import torch

from zeroweave._torch.modes import fake_tensors
from zeroweave.plan.device import Lane, Meter, Passed, PlannedClock, PlannedKernels
from zeroweave.plan.hardware import GPUS, Efficiency, Hardware

HARDWARE = Hardware(GPUS["h200"], Efficiency())


def test_a_storage_counts_until_nobody_views_it() -> None:
    clock = PlannedClock()
    with fake_tensors(), Meter(clock, HARDWARE):
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


def test_what_was_made_since_is_told_apart() -> None:
    clock = PlannedClock()
    meter = Meter(clock, HARDWARE)
    with fake_tensors(), meter:
        before = torch.empty(8)
        since = meter.made
        x, y = torch.empty(16), torch.empty(32)
        assert meter.alive(since) == x.nbytes + y.nbytes
        del y, before
        assert meter.alive(since) == clock.allocated() == x.nbytes


def test_what_lies_in_host_memory_is_not_counted() -> None:
    clock = PlannedClock()
    meter = Meter(clock, HARDWARE)
    with fake_tensors(), meter:
        with meter.elsewhere():
            host = torch.zeros(1024)
        assert clock.allocated() == 0 and clock.now == 0.0
        view = host[:3]
        assert clock.allocated() == 0
        assert (view + 1).nbytes == clock.peak()


def test_each_lane_has_its_own_time() -> None:
    clock, lane = PlannedClock(), Lane()
    clock.spend(1.0)
    with clock.on(lane):
        clock.spend(5.0)
        end = Passed(clock, clock.now)
    assert clock.now == 1.0 and not end.query()
    clock.lane.wait_event(end)
    assert clock.now == 5.0 and end.query()


def test_an_update_takes_what_its_kernel_reads_and_writes() -> None:
    clock, numel = PlannedClock(), 10**6
    kernels = PlannedKernels(clock, HARDWARE)
    master, gradient = (torch.empty(numel, dtype=torch.bfloat16, device="meta") for _ in range(2))
    remainder = torch.empty(numel, dtype=torch.int16, device="meta")
    first, second = (torch.empty(numel, device="meta") for _ in range(2))
    here = master, remainder, gradient, first, second, second, gradient, gradient, gradient, numel, 0.9
    kernels.adam[kernels.programs(numel)](*here, SPLIT=True)
    assert clock.now == HARDWARE.compute(0, 26 * numel, 2)
    kernels.sgd[kernels.programs(numel)](first, first, gradient, gradient, gradient, gradient, gradient, numel)
    assert clock.now == HARDWARE.compute(0, 26 * numel, 2) + HARDWARE.compute(0, 10 * numel, 2)


def test_an_update_of_compact_states_takes_what_was_measured() -> None:
    """Llama-1B on one H200: steps of 31.0 ms, and of 22.5 with full states. On an A100 arithmetic takes longer."""
    numel, seconds = 1_240_000_000, {}
    for gpu in ("h200", "a100"):
        clock = PlannedClock()
        kernels = PlannedKernels(clock, Hardware(GPUS[gpu], Efficiency()))
        master, gradient = (torch.empty(numel, dtype=torch.bfloat16, device="meta") for _ in range(2))
        remainder, first, second = (torch.empty(numel, dtype=torch.int8, device="meta") for _ in range(3))
        scales = torch.empty(numel // 64, device="meta"), torch.empty(numel // 64, device="meta")
        here = master, remainder, gradient, first, second, *scales, gradient, gradient, gradient, numel, 0.9
        kernels.compact_adam[kernels.programs(numel)](*here, SPLIT=True)
        seconds[gpu] = clock.now
    full = HARDWARE.compute(0, 26 * numel, 2)
    assert seconds["h200"] - full == pytest.approx(31.0e-3 - 22.5e-3, rel=0.05)
    assert seconds["a100"] == pytest.approx(seconds["h200"] * 67 / 19.5, rel=1e-3)
