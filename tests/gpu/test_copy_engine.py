"""Gathers by copy engine: the bits of kernels' gathers, and no kernel of NCCL's for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gathers import SIZES, measured
from tests.gpu import copy_engine_jobs as jobs
from tests.gpu import graph_jobs
from tests.gpu.graph_jobs import Case
from tests.gpu.leaving import WAYS
from zeroweave.comm import copy_engine

pytestmark = pytest.mark.gpus(2)
Ranks = Callable[..., list[Any]]

CHANGES: list[dict[str, Any]] = [
    {"prefetch": 1},
    {"prefetch": 3, "depth": 4},
    {"keep": "all"},
    {"keep": "none", "prefetch": 0, "depth": 1},
]


@pytest.mark.parametrize(
    ("stage", "mode", "accumulated"), [(1, "eager", 2), (2, "inductor", 1), (3, "inductor", 1), (3, "eager", 2)]
)
def test_the_bits_are_those_of_kernels(ranks: Ranks, stage: int, mode: str, accumulated: int) -> None:
    for kernel, copies in ranks(jobs.both, stage, mode, 30, accumulated):
        assert kernel.losses == copies.losses and kernel.parameters == copies.parameters
        assert copies.symmetric > 0 and copies.gathers.startswith("by copy engine"), copies
        assert kernel.symmetric == 0 and kernel.gathers.startswith("by kernel"), kernel
        assert kernel.departures == copies.departures == 0


def test_flats_leave_nothing_behind_when_they_get_buffers(ranks: Ranks) -> None:
    for (kernel, _, flats), (copies, symmetric, _) in ranks(jobs.both_cached):
        assert symmetric >= flats > 200 << 20
        assert copies <= kernel + symmetric - flats // 2, (kernel, copies, symmetric, flats)


@pytest.mark.parametrize(("stage", "prefetch"), [(3, 0), (3, 1), (2, 1)])
def test_departures_views_and_evaluation(ranks: Ranks, stage: int, prefetch: int) -> None:
    for kernel, copies in ranks(jobs.both_strayed, stage, prefetch):
        assert kernel == copies
        assert kernel[2] > 0 and copies[3], copies


LEAST = 20 << 20
"""Bytes that a registered buffer has at least: none of these buckets is larger."""


@pytest.mark.parametrize("least", [1, 1 << 20])
def test_every_schedule_gives_the_same_gradients(ranks: Ranks, least: int) -> None:
    for found in ranks(jobs.schedules, CHANGES, least):
        assert all(same and followed for same, followed, *_ in found), found
        assert all(there and (rest > 0) == (least > 1) for *_, there, rest, _, _ in found), found
        assert len({count for *_, count, _ in found}) > 1
        assert all(symmetric == count * LEAST for *_, count, symmetric in found), "there are those that are needed"


@pytest.mark.parametrize("stage", [2, 3])
def test_no_kernel_gathers(ranks: Ranks, stage: int) -> None:
    for traced, scheduled, issued in ranks(jobs.kernels, stage):
        assert scheduled["all_gather"] > 0 and scheduled == issued, (scheduled, issued)
        assert traced == {kind: count for kind, count in scheduled.items() if kind != "all_gather"}, traced


def test_all_ranks_choose_the_same_way(ranks: Ranks) -> None:
    (told, least, seconds, losses), *others = ranks(jobs.automatic)
    print(told, f"{seconds:.2f} s to initialize", sep="\n")
    assert least == copy_engine.LEAST
    for other in others:
        assert other[:2] == (told, least)
    assert all(loss == loss for loss in losses)


def test_captured_gathers_are_replayed(ranks: Ranks) -> None:
    for eager, replayed, kept in ranks(jobs.captured):
        assert eager and replayed and kept, (eager, replayed, kept)


PLACED: dict[str, Any] = {"transport": {"gathers": "copy_engine"}}


@pytest.mark.parametrize(
    "case", [Case(3, more=PLACED), Case(3, 4, "eager", delays=True, more=PLACED), Case(2, 4, more=PLACED)], ids=str
)
def test_graphed_calls_are_exact(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        assert (run.graphed >= case.steps * case.gas // 2) == (case.mode != "eager"), run.ungraphed


@pytest.mark.parametrize("stage", [2, 3])
def test_whatever_else_a_program_does_between_graphed_calls_is_exact(ranks: Ranks, stage: int) -> None:
    for differs, run in ranks(graph_jobs.compared, Case(stage, loop="busy", steps=70, more=PLACED)):
        assert not differs
        assert run.graphed >= 20, run.ungraphed


@pytest.mark.parametrize(("stage", "accumulated"), [(3, 1), (3, 4), (2, 2)])
def test_evaluation_between_replays_disturbs_nothing(ranks: Ranks, stage: int, accumulated: int) -> None:
    for same, replayed in ranks(jobs.both_between, stage, accumulated):
        assert same and replayed > 10 * accumulated, (same, replayed)


def test_gathers_are_measured() -> None:
    for costs in measured(torch.cuda.device_count()):
        assert [cost.nbytes for cost in costs] == [*SIZES]
        assert all(cost.alone > 0 and cost.beside > 0 and cost.lost >= 0 for cost in costs), costs


@pytest.mark.parametrize("way", WAYS)
def test_a_program_may_end_without_ending_its_engine(way: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "tests.gpu.leaving", way], capture_output=True, text=True, timeout=180)
    assert done.stdout.count("leaves") == 2, done.stderr
    assert (done.returncode == 0) == (way != "exit"), done.stderr
    assert "terminate called" not in done.stderr and "Segmentation" not in done.stderr, done.stderr
