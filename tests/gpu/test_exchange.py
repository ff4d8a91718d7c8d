"""Reductions by copy engine: the bits of kernels' between two GPUs, and no kernel of NCCL's for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import copy_engine_jobs as jobs
from tests.gpu import exchange_jobs, graph_jobs
from tests.gpu.graph_jobs import Case

pytestmark = pytest.mark.gpus(2)
Ranks = Callable[..., list[Any]]
ALL: dict[str, Any] = {"transport": jobs.EXCHANGE}


@pytest.mark.parametrize(
    ("stage", "mode", "accumulated"), [(1, "eager", 2), (2, "inductor", 1), (3, "inductor", 3), (3, "eager", 2)]
)
def test_the_bits_are_those_of_kernels(ranks: Ranks, stage: int, mode: str, accumulated: int) -> None:
    """Ranks are late now and then."""
    for kernel, copies in ranks(jobs.both, stage, mode, 30, accumulated, ("kernel", "all")):
        assert kernel.losses == copies.losses and kernel.parameters == copies.parameters
        assert copies.symmetric > 0 and copies.reductions.startswith("by copy engine"), copies
        assert kernel.symmetric == 0 and kernel.reductions.startswith("by kernel"), kernel


def test_gathers_may_go_by_kernel(ranks: Ranks) -> None:
    for kernel, copies in ranks(jobs.both, 2, "inductor", 10, 1, ("kernel", "reductions")):
        assert kernel.losses == copies.losses and kernel.parameters == copies.parameters
        assert copies.gathers.startswith("by kernel") and copies.symmetric > 0, copies


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_kernel_reduces(ranks: Ranks, stage: int) -> None:
    for traced, scheduled, issued in ranks(jobs.kernels, stage, "all"):
        assert scheduled["reduce_scatter"] > 0 and scheduled == issued, (scheduled, issued)
        kinds = "all_gather", "reduce_scatter"
        assert traced == {kind: count for kind, count in scheduled.items() if kind not in kinds}, traced


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
def test_sums_are_those_of_float64(pools: Any, world: int, dtype: torch.dtype) -> None:
    """From outboxes and copies in turn, which ranks choose differently; outside of graphs, captured and replayed."""
    for worst, boxed in pools(world).run(exchange_jobs.means, dtype, deadline=120.0):
        assert max(worst) <= 0.51 * torch.finfo(dtype).eps * 8, worst
        assert boxed


@pytest.mark.parametrize(
    "case",
    [
        Case(3, more=ALL),
        Case(3, 4, "eager", delays=True, more=ALL),
        Case(2, 4, more=ALL),
        Case(2, loop="plain", clipping=0.5, more=ALL),
        Case(1, 2, dtype="float16", overflow=30, more=ALL),
        Case(2, 2, loop="coalesced", more=ALL),
    ],
    ids=str,
)
def test_captured_steps_are_exact(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        assert run.captured == 1 and run.replayed >= case.steps // 2, run.uncaptured


@pytest.mark.parametrize("stage", [2, 3])
def test_whatever_else_a_program_does_between_captured_steps_is_exact(ranks: Ranks, stage: int) -> None:
    for differs, run in ranks(graph_jobs.compared, Case(stage, loop="busy", steps=70, more=ALL)):
        assert not differs
        assert run.captured >= 2 and run.replayed >= 20, run.uncaptured
