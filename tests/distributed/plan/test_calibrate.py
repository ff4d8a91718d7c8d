"""Ranks measure what they can do; what they cannot stays as it is."""

from __future__ import annotations

import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import Pools
from zeroweave.plan.calibrate import measure
from zeroweave.plan.hardware import Calibration

ALONE = {"matmul", "attention", "memory"}


def measured(ranks_per_host: int) -> Calibration:
    """As if so many ranks were on each machine."""
    with mock.patch.object(socket, "gethostname", lambda: f"host {dist.get_rank() // ranks_per_host}"):
        return measure(torch.device("cpu"))


def test_ranks_of_one_machine(pools: Pools) -> None:
    one, other = pools(2).run(measured, 2)
    assert one == other and (one.device, one.ranks, one.hosts) == ("cpu", 2, 1)
    assert one.rates.keys() == {*ALONE, "inside"} and one.seconds.keys() == {"launch"}
    assert all(rate > 0 for rate in one.rates.values())


@pytest.mark.matrix
def test_ranks_of_several_machines(pools: Pools) -> None:
    apart = pools(2).run(measured, 1)[0]
    assert apart.hosts == 2 and apart.rates.keys() == {*ALONE, "between"}
    assert apart.seconds.keys() == {"hop_between"}
    both = pools(4).run(measured, 2)[0]
    assert both.rates.keys() == {*ALONE, "inside", "between"} and both.seconds.keys() == {"launch", "hop_between"}


@pytest.mark.matrix
def test_three_ranks_tell_a_hop_from_the_launch(pools: Pools) -> None:
    assert pools(3).run(measured, 3)[0].seconds.keys() == {"launch", "hop_inside"}
