"""The runtime by name on GPUs: streams, lifetimes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import dc_jobs
from tests.gpu.conftest import COMPILING
from tests.support.harness import Pool

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_by_name(ranks: Ranks, stage: int, late: bool) -> None:
    for double_buffer in (True, False):
        assert max(ranks(dc_jobs.by_name, stage, late, double_buffer)) <= 1e-6


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("held", ["whole", "even", "uneven"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_into_buffers_of_the_callers(ranks: Ranks, stage: int, held: str, late: bool) -> None:
    """Together and alone: a window's first result is then written into the buffer directly, where it fits."""
    for bucket in (3 * 256 * 256, 256 * 256):
        for worst, kinds, _ in ranks(dc_jobs.into_buffers, stage, held, bucket, late, True):
            assert worst <= 1e-6 and kinds == {"all_reduce" if held == "whole" else "reduce_scatter"}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_above_the_size_of_the_one_bucket(ranks: Ranks, stage: int, late: bool) -> None:
    """Each has the communication to itself: its staging is reused only when the one before is settled."""
    for worst, _, staging in ranks(dc_jobs.into_buffers, stage, "uneven", 1000, late, False):
        assert worst <= 1e-6 and 4 * 256 * 256 <= staging <= 4 * 256 * 256 + 2 * 128


def test_late_communication_changes_no_loss(ranks: Ranks) -> None:
    for stage in (1, 2, 3):
        usual, late = ranks(dc_jobs.losses, stage, 6, False), ranks(dc_jobs.losses, stage, 6, True)
        assert usual == late, (stage, usual, late)


@pytest.mark.parametrize("late", [False, True])
def test_gathers_by_name(ranks: Ranks, late: bool) -> None:
    for errors in ranks(dc_jobs.gathered, late):
        assert max(errors) == 0.0, errors


@pytest.mark.gpus(2)
@pytest.mark.parametrize("late", [False, True])
def test_symmetric_memory_gathers_without_a_kernel(ranks: Ranks, late: bool) -> None:
    """The same gathers without it show that a kernel would be seen."""
    for found in ranks(dc_jobs.buffered, True, late):
        assert found.told == [] and found.wrong == [] and found.gathers == 2, found
        assert found.kernels == 0 and found.copied >= found.gathered, found
        assert found.sizes[0] == 0 < dc_jobs.FIRST <= found.sizes[1] < dc_jobs.LARGEST <= found.sizes[2], found
        assert found.left == 0, found
    for found in ranks(dc_jobs.buffered, False, late):
        assert found.told == [] and found.wrong == [] and found.gathers == 2, found
        assert found.kernels > 0 and found.copied < found.gathered and found.sizes == [0, 0, 0], found


def test_symmetric_memory_of_one_rank_says_why_not(pools: Callable[[int], Pool]) -> None:
    why = "symmetric_memory: nothing is gathered in a world of 1. Parameters are gathered as without it"
    assert pools(1).run(dc_jobs.unbuffered, deadline=COMPILING) == [([why], True)]


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="ranks share the GPU of a machine that has one")
def test_symmetric_memory_of_ranks_that_share_a_gpu_says_why_not(ranks: Ranks) -> None:
    why = "symmetric_memory: ranks 0 and 1 share a GPU. Parameters are gathered as without it"
    assert ranks(dc_jobs.unbuffered) == [([why], True), ([], True)]


def test_gradients_are_there_from_the_reduction_to_the_release(ranks: Ranks) -> None:
    for found in ranks(dc_jobs.footprint):
        assert found.registered == 0 and found.released == 0, found
        assert found.partition <= found.taken <= found.partition + 512, found


def test_nothing_waits_for_the_device_inside_a_backward(ranks: Ranks) -> None:
    for reductions, kernels, waits in ranks(dc_jobs.synchronisations):
        assert reductions == 6 and kernels >= 24 * 2, (reductions, kernels)
        assert not waits, waits


def test_a_thousand_steps(ranks: Ranks) -> None:
    for found in ranks(dc_jobs.losses, 1, 1000, False):
        assert len(found) == 1000 and all(map(math.isfinite, found))
        assert sum(found[-50:]) < sum(found[:50])


@pytest.mark.parametrize("switches", [False, True])
def test_steps_without_communication_change_nothing(ranks: Ranks, switches: bool) -> None:
    for stage in (1, 3):
        for usual, rehearsed, kernels, planned, sent in ranks(dc_jobs.profiled, stage, switches):
            assert usual == rehearsed, (stage, usual, rehearsed)
            assert not kernels and planned == sent and sent["all_gather"] > 0, (stage, kernels, planned, sent)
