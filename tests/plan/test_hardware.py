"""What data sheets make of kernels and collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroweave.plan.hardware import GPUS, Efficiency, Hardware

WHOLE = Efficiency(1, 1, 1, 1, 1, 1, contention=0, kernel=0, launch=0, hop_inside=0, hop_between=0)
H200 = Hardware(GPUS["h200"], WHOLE)


def test_a_kernel_takes_what_its_arithmetic_or_its_memory_takes() -> None:
    assert H200.compute(989.5e12, 1.0, itemsize=2) == pytest.approx(1.0)
    assert H200.compute(67e12, 1.0, itemsize=4) == pytest.approx(1.0)
    assert H200.compute(1.0, 4.8e12, itemsize=2) == pytest.approx(1.0)


def test_a_ring_moves_at_the_pace_of_its_slowest_part() -> None:
    inside, between = H200.collective(8), H200.collective(1024)
    assert inside.beta == pytest.approx(7 / 8 / 450e9)
    assert between.beta == pytest.approx(1023 / 1024 / (8 * 50e9))
    slow = Hardware(replace(H200.gpu, between=1e9), WHOLE)
    assert slow.collective(8) == inside  # nothing leaves the node
    assert slow.collective(1024).beta == pytest.approx(1023 / 1024 / 8e9)
    assert H200.collective(1)(1 << 30) == 0.0


def test_each_further_rank_of_a_ring_is_one_more_hop() -> None:
    hops = Hardware(H200.gpu, replace(WHOLE, launch=1.0, hop_inside=0.001, hop_between=0.1))
    assert hops.collective(16).alpha == pytest.approx(1.0 + 14 * 0.001 + 0.1)


def test_copies_go_over_the_link_to_host_memory() -> None:
    assert H200.copy(64e9) == pytest.approx(1.0)
    slow = Hardware(replace(H200.gpu, host=1e9), replace(WHOLE, host=0.5, kernel=0.25))
    assert slow.copy(1e9) == pytest.approx(2.25)
