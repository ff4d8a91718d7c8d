"""Checkpoints on GPUs: the same bits, also where the copies run beside the steps, and a host that waits for no copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import checkpoint_jobs as jobs
from tests.gpu.conftest import COMPILING
from tests.support.harness import Pool

Ranks = Callable[..., list[Any]]
MIB = 2**20


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize(
    ("stage", "mode", "offload", "other"),
    [
        (1, "eager", "none", "all"),
        (2, "inductor", "none", "none"),
        (3, "inductor", "none", "both"),
        (3, "eager", "all", "params"),
        (3, "eager", "both", "none"),
    ],
)
def test_a_run_goes_on_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, mode: str, offload: str, other: str, asynchronous: bool
) -> None:
    assert ranks(jobs.resumed, tmp_path, stage, mode, offload, asynchronous, other) == [[], []]


@pytest.mark.gpus(4)
@pytest.mark.parametrize(("stage", "mode"), [(1, "eager"), (2, "inductor"), (3, "inductor")])
def test_four_ranks_go_on_with_the_same_bits_after_two_had_the_checkpoint(
    pools: Callable[[int], Pool], tmp_path: Path, stage: int, mode: str
) -> None:
    """The two load what four saved, and save it; four load that, and train as if nothing had been between."""
    pools(4).run(jobs.goes_on, tmp_path, stage, mode, deadline=COMPILING)
    assert pools(2).run(jobs.passes_on, tmp_path, stage, mode, deadline=COMPILING) == [[]] * 2
    assert pools(4).run(jobs.takes_up, tmp_path, stage, mode, deadline=COMPILING) == [[]] * 4


@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (3, "none"), (3, "all"), (3, "both"), (3, "adaptive")])
def test_copies_are_of_the_moment_of_the_save(ranks: Ranks, tmp_path: Path, stage: int, offload: str) -> None:
    assert ranks(jobs.overtaken, tmp_path, stage, offload) == [[], []]


def test_the_host_waits_for_no_copy(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(jobs.blocks, tmp_path) == [(True, True)] * 2


def test_copies_take_no_memory_of_the_device(ranks: Ranks, tmp_path: Path) -> None:
    for _, beside, plain in ranks(jobs.pinned_bytes, tmp_path):
        assert beside <= plain + MIB
