"""Many steps with asynchronous saves beside them: each checkpoint is what a run without saves had at that step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroweave as zw
from tests.distributed.checkpoint.runs import WIDTH, Facts, differing, everything, make, seed_ranks
from tests.distributed.checkpoint.test_asynchronous import slow
from tests.support.harness import Pools

pytestmark = pytest.mark.matrix

STEPS, EVERY = 150, 5
ROWS = (6, 2, 4, 6, 3)
"""The rows of a rank's batches, one after the other."""

Row = tuple[str, int, str, str, dict[str, Any]]


def step(engine: zw.Engine) -> float:
    """One optimizer step, on rows of this rank alone."""
    for _ in range(engine.config.gradient_accumulation_steps):
        index = engine.micro_steps
        numbers = torch.Generator().manual_seed(2 * index + engine.rank)
        loss = engine(torch.randn(ROWS[index % len(ROWS)], WIDTH, generator=numbers)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def without_saves(model: str, stage: int, mode: str, more: dict[str, Any]) -> tuple[list[float], list[Facts], int]:
    """The losses, all that there was whenever the other run saves, and how often something was compiled."""
    losses, states = [], []
    with make(model, "adamw", stage, mode, 0, **more) as engine:
        seed_ranks()
        for number in range(STEPS):
            losses.append(step(engine))
            if number % EVERY == 0:
                states.append(everything(engine))
        return losses, states, engine.stats.graphs


def endures(folder: Path, model: str, stage: int, mode: str, phase: str, more: dict[str, Any]) -> list[str]:
    losses, states, graphs = without_saves(model, stage, mode, more)
    tags, found = [], []
    with slow(phase, 0.03):
        engine = make(model, "adamw", stage, mode, 0, **more)
    with engine:
        seed_ranks()
        for number in range(STEPS):
            if (loss := step(engine)) != losses[number]:
                found.append(f"step {number}: {loss} and {losses[number]}")
            if number % EVERY == 0:
                tags.append(engine.save(folder, asynchronous=True))
        assert engine.stats.graphs == graphs
    assert not [each for each in threading.enumerate() if each.name == "zeroweave checkpoint"]
    with make(model, "adamw", stage, mode, 1, **more) as engine:
        for tag, state in zip(tags, states, strict=True):
            engine.load(folder, tag)
            found += differing(state, everything(engine), tag)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *tags]
    return found


ENDURED: list[Row] = [
    ("noisy", 1, "eager", "write", {}),
    ("noisy", 3, "aot_eager", "write,rank=1", {}),
    ("noisy", 3, "eager", "none", {"bucket": {"bytes": 256}}),
    ("odd", 3, "eager", "stage,rank=0", {"offload": {"optimizer": "all", "params": True}}),
    ("odd", 1, "aot_eager", "write,rank=0", {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}),
    (
        "odd",
        2,
        "eager",
        "write",
        {"bucket": {"bytes": 256}, "offload": {"optimizer": "adaptive", "memory_budget": 2000}},
    ),
    ("plain", 1, "eager", "none", {"precision": {"params": "float16", "initial_loss_scale": 2.0**40}}),
]
"""Small buckets are read and updated in turns; where a rank alone is slow, the other is done before it."""


@pytest.mark.parametrize(("model", "stage", "mode", "phase", "more"), ENDURED)
def test_each_checkpoint_is_what_there_was(
    pools: Pools, tmp_path: Path, model: str, stage: int, mode: str, phase: str, more: dict[str, Any]
) -> None:
    assert pools(2).run(endures, tmp_path, model, stage, mode, phase, more) == [[], []]
