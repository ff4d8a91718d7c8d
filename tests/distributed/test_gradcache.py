"""examples/gradcache.py: the same training as with the whole batch at once, and one reduction of each bucket a step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.gradcache import BATCHES, DEPTH, Encoder, Run, contrast, pairs, train
from tests.cli.commands import ROOT
from tests.distributed.dc_world import Pools
from tests.distributed.reference import average, worst

STEPS, BATCH, CHUNK = 4, 8, 4
CHUNKS = 2 * BATCH // CHUNK
MODES: dict[str, dict[str, Any]] = {"eager": {"enabled": False}, "aot_eager": {"lower": "aot_eager"}, "inductor": {}}


def whole() -> tuple[list[float], dict[str, Tensor]]:
    """The unsharded model, all texts of a batch in one graph; embedded in chunks, for the same dropout masks."""
    torch.manual_seed(0)
    model, losses = Encoder().train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        tokens = pairs(BATCH, step % BATCHES, dist.get_rank())
        loss = contrast(torch.cat([model(part) for part in tokens.split(CHUNK)]))
        loss.backward()
        losses.append(loss.item())
        average(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def beside(stage: int, mode: str) -> tuple[dict[bool, Run], list[float], tuple[float, str]]:
    """Both ways to train, by `coalesce`; the losses of the whole batch, and how far the weights are from its.

    Inductor draws other dropout masks than eager kernels, so there the two are compared with each other.
    """
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 60.0}
    runs = {coalesce: train(config, coalesce, STEPS, BATCH, CHUNK) for coalesce in (True, False)}
    losses, weights = whole() if mode != "inductor" else (runs[False].losses, runs[False].weights)
    far = max(worst(run.weights, weights) for run in runs.values()) if dist.get_rank() == 0 else (0.0, "")
    return runs, losses, far


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        (2, "aot_eager"),
        (3, "aot_eager"),
        pytest.param(2, "eager", marks=pytest.mark.matrix),
        pytest.param(3, "eager", marks=pytest.mark.matrix),
        pytest.param(3, "inductor", marks=pytest.mark.matrix),
    ],
)
def test_cached_chunks_train_as_the_whole_batch(pools: Pools, stage: int, mode: str) -> None:
    tolerance = 1e-5 if mode == "inductor" else 1e-6
    for runs, losses, weights in pools(2).run(beside, stage, mode):
        buckets = DEPTH + 2  # the blocks, what comes before them and what comes after
        assert weights[0] <= tolerance, weights
        for coalesce, run in runs.items():
            assert run.drift <= tolerance, "the second pass has other dropout masks than the first"
            assert run.losses == pytest.approx(losses, rel=10 * tolerance)
            assert run.collectives["reduce_scatter"] == buckets * (1 if coalesce else CHUNKS)
        assert runs[True].collectives["all_gather"] == runs[False].collectives["all_gather"]


def test_the_script() -> None:
    script = str(ROOT / "examples" / "gradcache.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--stage", "3", "--steps", "5"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "collectives of a step with 4 backwards: {'all_gather'" in done.stdout
    assert f"'reduce_scatter': {DEPTH + 2}}}" in done.stdout
