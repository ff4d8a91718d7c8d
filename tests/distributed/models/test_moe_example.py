"""examples/moe.py: experts on different ranks train as with all of them on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.moe import Model, Run, sentences, train
from tests.support.commands import ROOT
from tests.support.harness import Pools
from tests.support.marks import WITH_INDUCTOR as MODES
from tests.support.reference import Plain, judge, judge_numbers

STEPS = 6


def backward(model: Any, data: torch.Tensor) -> float:
    """The loss of all ranks, after its backward."""
    loss = model(data)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def beside(stage: int, mode: str, parallel_size: int) -> tuple[Run, tuple[float, str], tuple[float, str]]:
    """The example's run; what `judge` says of its losses and weights beside the unsharded model with all experts."""
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0}
    run = train(config, parallel_size, STEPS)
    torch.manual_seed(0)
    plain, losses = Plain(Model(None), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)), []
    for step in range(STEPS):
        losses.append(plain.each(backward, sentences(step, dist.get_rank(), dist.get_world_size())))
        plain.average()
        plain.step()
    weights = judge(run.weights, plain.values()) if dist.get_rank() == 0 else (0.0, "")
    return run, judge_numbers(run.losses, tuple(zip(*losses, strict=True))), weights


@pytest.mark.parametrize(
    ("stage", "mode", "parallel_size"),
    [
        (2, "eager", 2),
        pytest.param(1, "aot_eager", 2, marks=pytest.mark.matrix),
        pytest.param(3, "inductor", 2, marks=pytest.mark.matrix),
        pytest.param(3, "inductor", 1, marks=pytest.mark.matrix),
    ],
)
def test_experts_on_two_ranks_train_as_on_one(pools: Pools, stage: int, mode: str, parallel_size: int) -> None:
    for run, losses, weights in pools(2).run(beside, stage, mode, parallel_size):
        assert losses[0] <= 1 and run.losses[-1] < run.losses[0] - 0.2, (losses, run.losses)
        assert weights[0] <= 1, weights


@pytest.mark.matrix
def test_the_script() -> None:
    script = str(ROOT / "examples" / "moe.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--stage", "3", "--steps", "11"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    first, last, summary = done.stdout.splitlines()[-3:]
    losses = [float(line.split()[3].rstrip(",")) for line in (first, last)]
    assert losses[1] < losses[0]
    assert summary.startswith("2 of 4 experts on each of 2 ranks; weights differ by ")
    assert float(summary.split()[-1]) < 1e-3
