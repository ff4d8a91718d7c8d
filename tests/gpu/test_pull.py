"""Reductions by pulling: the average of what the ranks have, whoever is late, and matmuls that leave room for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import graph_jobs
from tests.gpu import pull_jobs as jobs
from tests.gpu.graph_jobs import Case
from tests.gpu.jobs import free_port

pytestmark = pytest.mark.gpus(2)
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("dtype", jobs.DTYPES)
def test_the_average_is_of_float32_sums(ranks: Ranks, dtype: str) -> None:
    for right, calls, told in ranks(jobs.sums, dtype):
        assert right == calls == 40
        assert told.startswith("by pulling up to"), told


@pytest.mark.parametrize("mode", ["inductor", "eager"])
def test_stages_are_equal_to_the_bit(ranks: Ranks, mode: str) -> None:
    for first, *others in ranks(jobs.stages, mode):
        losses, parameters, told, departures, pulled = first
        assert losses[-1] < losses[0] and departures == 0 and pulled and told.startswith("by pulling"), first
        assert all(other[:2] == (losses, parameters) and other[4] for other in others)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, more=jobs.PULL),
        Case(2, 4, delays=True, more=jobs.PULL),
        Case(1, 2, "inductor", delays=True, more=jobs.PULL),
        Case(3, 4, loop="coalesced", more=jobs.PULL),
        Case(2, dtype="float16", clipping=1.0, overflow=30, more=jobs.PULL),
    ],
    ids=str,
)
def test_captured_steps_are_exact(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        steps = case.steps * (1 if case.loop == "coalesced" else case.gas)
        assert run.captured >= 1 and run.replayed >= steps // 2, run.uncaptured


@pytest.mark.parametrize("stage", [2, 3])
def test_whatever_else_a_program_does_between_captured_steps_is_exact(ranks: Ranks, stage: int) -> None:
    for differs, run in ranks(graph_jobs.compared, Case(stage, loop="busy", steps=70, more=jobs.PULL)):
        assert not differs
        assert run.captured >= 2 and run.replayed >= 20, run.uncaptured


def test_matmuls_leave_room_where_they_are_told_to(ranks: Ranks) -> None:
    every = torch.cuda.get_device_properties(0).multi_processor_count
    for inside, both, behind, right in ranks(jobs.room):
        assert (inside, both, behind, right) == (every - 4, every - 4, 0, True)


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    port = str(free_port())
    commands = [[sys.executable, "-m", "tests.gpu.missing", str(rank), port] for rank in (0, 1)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        told = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == 5, told
    assert processes[0].returncode not in (0, -9), told
    assert "rank 0 has made step 3" in told[0] and "rank 0 has made step 4" not in told[0], told
    assert "rank 1" in told[0].split("step 3", 1)[1], told
