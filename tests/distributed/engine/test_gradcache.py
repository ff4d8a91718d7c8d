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
from tests.support.commands import ROOT
from tests.support.harness import Pools
from tests.support.marks import WITH_INDUCTOR as MODES
from tests.support.reference import Expected, Plain, judge, judge_numbers

pytestmark = pytest.mark.matrix

STEPS, BATCH, CHUNK = 4, 8, 4
CHUNKS = 2 * BATCH // CHUNK
DRIFT = 1e-3
"""Other masks change outputs by more than 0.1; Inductor rounds other things in a pass without gradients."""


def backward(model: Any, tokens: Tensor) -> float:
    loss = contrast(torch.cat([model(part) for part in tokens.split(CHUNK)]))
    loss.backward()
    return loss.item()


def whole() -> tuple[tuple[Any, ...], Expected]:
    """The unsharded model's losses and weights, all texts of a batch in one graph.

    They are embedded in chunks, for the same dropout masks.
    """
    torch.manual_seed(0)
    plain = Plain(Encoder().train(), lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9))
    losses = []
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        losses.append(plain.each(backward, pairs(BATCH, step % BATCHES, dist.get_rank())))
        plain.average()
        plain.step()
    return tuple(zip(*losses, strict=True)), plain.values()


def beside(stage: int, mode: str) -> tuple[dict[bool, Run], list[tuple[float, str]]]:
    """Both ways to train, by `coalesce`; what `judge` says of their losses and weights beside the whole batch's.

    Inductor draws other dropout masks than eager kernels unless told to take those.
    """
    config = {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0}
    with torch._inductor.config.patch(fallback_random=True):
        runs = {coalesce: train(config, coalesce, STEPS, BATCH, CHUNK) for coalesce in (True, False)}
    losses, weights = whole()
    found = [judge_numbers(run.losses, losses) for run in runs.values()]
    if dist.get_rank() == 0:
        found += [judge(run.weights, weights) for run in runs.values()]
    return runs, found


@pytest.mark.parametrize(
    ("stage", "mode"),
    [(2, "aot_eager"), (3, "aot_eager"), (2, "eager"), (3, "eager"), (3, "inductor")],
)
def test_cached_chunks_train_as_the_whole_batch(pools: Pools, stage: int, mode: str) -> None:
    for runs, found in pools(2).run(beside, stage, mode):
        buckets = DEPTH + 2  # the blocks, what comes before them and what comes after
        assert max(found)[0] <= 1, found
        for coalesce, run in runs.items():
            assert run.drift <= DRIFT, "the second pass has other dropout masks than the first"
            assert run.collectives["reduce_scatter"] == buckets * (1 if coalesce else CHUNKS)
        assert runs[True].collectives["all_gather"] == runs[False].collectives["all_gather"]


def test_the_script() -> None:
    script = str(ROOT / "examples" / "gradcache.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--stage", "3", "--steps", "5"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "collectives of a step with 4 backwards: {'all_gather'" in done.stdout
    assert f"'reduce_scatter': {DEPTH + 2}}}" in done.stdout
