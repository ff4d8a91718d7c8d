"""Experts on different GPUs over NCCL train as with all of them on every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import expert_jobs
from tests.gpu.conftest import COMPILING
from tests.support.harness import Pool

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("parallel_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "mode", "coalesce"),
    [(1, "eager", False), (2, "inductor", True), (3, "inductor", False), (3, "eager", True)],
)
def test_fp32_gradients(ranks: Ranks, stage: int, mode: str, coalesce: bool, parallel_size: int) -> None:
    tolerance = 1e-5 if mode == "inductor" else 1e-6
    for rank, (found, departures) in enumerate(ranks(expert_jobs.gradients, stage, mode, parallel_size, coalesce)):
        assert max(found)[0] <= tolerance and departures == 0, f"rank {rank}: {found}, {departures} departures"


@pytest.mark.parametrize("mode", ["inductor", "eager"])
@pytest.mark.parametrize("parallel_size", [1, 2])
def test_stages_agree_bit_for_bit(ranks: Ranks, mode: str, parallel_size: int) -> None:
    for found in ranks(expert_jobs.stages_bitwise, mode, parallel_size):
        assert found[1] == found[2] == found[3], found


@pytest.mark.gpus(4)
@pytest.mark.parametrize(("stage", "mode"), [(2, "inductor"), (3, "eager")])
def test_pairs_of_four_share_experts(pools: Callable[[int], Pool], stage: int, mode: str) -> None:
    tolerance = 1e-5 if mode == "inductor" else 1e-6
    for found, departures in pools(4).run(expert_jobs.gradients, stage, mode, 2, False, deadline=COMPILING):
        assert max(found)[0] <= tolerance and departures == 0, found
    for found in pools(4).run(expert_jobs.stages_bitwise, mode, 2, deadline=COMPILING):
        assert found[1] == found[2] == found[3], found
