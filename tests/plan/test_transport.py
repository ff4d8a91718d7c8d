"""Copies between the device and host memory run beside the computation, and a gather waits for its upload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from tests.plan.test_hardware import WHOLE
from zeroweave._torch.modes import fake_tensors
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.plan.device import Meter, PlannedClock, PlannedCopies, PlannedTransport
from zeroweave.plan.hardware import GPUS, Hardware
from zeroweave.runtime.transfers import Download, Transfers

# A byte of a copy takes a second, one of a collective of two ranks half of one; memory takes none.
HARDWARE = Hardware(replace(GPUS["h200"], host=1.0, inside=1.0, bandwidth=1e30), WHOLE)


class World:
    """Rank 0 of two."""

    def __init__(self) -> None:
        self.clock = PlannedClock()
        self.meter = Meter(self.clock, HARDWARE)
        self.transfers = Transfers(
            torch.device("cpu"), streams=lambda _: PlannedCopies(self.meter, self.clock, HARDWARE)
        )
        self.transport = PlannedTransport(2, self.clock, HARDWARE)


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as inside:
        made = World()
        inside.enter_context(fake_tensors())
        inside.enter_context(made.meter)
        yield made


def test_only_who_needs_a_copy_waits_for_it(world: World) -> None:
    clock, host = world.clock, world.transfers.zeros(4, torch.float32)
    call = torch.empty(64)
    world.transfers.slack.begin_backward()
    world.transfers.slack.call_begins()
    del call  # there is room for as much
    assert clock.allocated() == 0
    clock.spend(1.0)
    upload = world.transfers.upload([host])
    assert clock.now == 1.0 and clock.allocated() == 16
    clock.spend(2.0)
    (copy,) = upload.wait()
    assert clock.now == 1.0 + 16
    world.transfers.download([Download(copy, host)])
    assert clock.now == 17.0
    del copy, upload
    assert clock.allocated() == 16, "it is still copied"
    world.transfers.sweep()
    assert clock.allocated() == 16
    clock.spend(16.0)
    world.transfers.sweep()
    assert clock.allocated() == 0


def test_an_upload_follows_the_download_of_the_same_memory(world: World) -> None:
    host = world.transfers.zeros(4, torch.float32)
    world.transfers.download([Download(torch.empty(4), host)])
    world.transfers.upload([host]).wait()
    assert world.clock.now == 32.0


def test_a_gather_waits_for_its_upload_and_the_computation_does_not(world: World) -> None:
    (layout,) = build_layout([ParameterSpec("w", (8,), "float32", 4, True, None)], 2, 1 << 20)
    shard = world.transfers.zeros(layout.shard_numel, torch.float32)
    flat, nbytes = torch.empty(layout.numel), layout.nbytes
    before = world.clock.allocated()
    pending = world.transfers.gather(world.transport, flat, shard, layout)
    assert world.clock.now == 0.0
    assert world.clock.allocated() == before + shard.tensor.nbytes == before + world.transfers.staged.now
    pending.wait()
    assert world.clock.now == shard.tensor.nbytes + nbytes / 2
    assert world.clock.allocated() == before and world.transfers.staged.now == 0
