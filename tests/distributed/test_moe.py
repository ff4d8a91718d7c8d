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
from tests.cli.commands import ROOT
from tests.distributed.dc_world import Pools
from tests.distributed.reference import average, worst

STEPS = 6
MODES: dict[str, dict[str, Any]] = {"eager": {"enabled": False}, "aot_eager": {"lower": "aot_eager"}, "inductor": {}}


def beside(stage: int, mode: str, parallel_size: int) -> tuple[Run, list[float], tuple[float, str]]:
    """The example's run; the losses of the unsharded model with all experts, and how far the weights are from its."""
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 60.0}
    run = train(config, parallel_size, STEPS)
    torch.manual_seed(0)
    model, losses = Model(None), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(sentences(step, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        average(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return run, losses, worst(run.weights, weights) if dist.get_rank() == 0 else (0.0, "")


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
    tolerance = 1e-5 if mode == "inductor" else 1e-6
    for run, losses, weights in pools(2).run(beside, stage, mode, parallel_size):
        assert run.losses == pytest.approx(losses, rel=tolerance) and losses[-1] < losses[0] - 0.2
        assert weights[0] <= tolerance, weights


def test_the_script() -> None:
    script = str(ROOT / "examples" / "moe.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--stage", "3", "--steps", "11"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, last, summary = done.stdout.splitlines()[-3:]
    losses = [float(line.split()[3].rstrip(",")) for line in (first, last)]
    assert losses[1] < losses[0]
    assert summary.startswith("2 of 4 experts on each of 2 ranks; weights differ by ")
    assert float(summary.split()[-1]) < 1e-3
