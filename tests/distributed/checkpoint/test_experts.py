"""Experts that not all ranks share are in a checkpoint under the name of each group's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import zeroweave as zw
from examples.moe import sentences
from tests.distributed.checkpoint.runs import differing
from tests.distributed.experts import PATTERN, build
from tests.support.harness import Pools
from tests.support.marks import MODES, daily


def make(stage: int, seed: int, **more: Any) -> zw.Engine:
    module = build(2, seed=seed)
    experts = {"parameters": [PATTERN], "parallel_size": 2}
    config = {"stage": stage, "compile": MODES["eager"], "experts": experts, "deadline_seconds": 200.0, **more}
    return zw.initialize(module, torch.optim.AdamW(module.parameters(), lr=1e-2), config)


def state(engine: zw.Engine) -> dict[str, Any]:
    names = [name for name, _ in engine.module.named_parameters()]
    return {f"{name} {key}": engine.full(name, key) for name in names for key in ("param", "exp_avg", "step")}


def train(engine: zw.Engine, first: int) -> list[float]:
    losses = []
    for index in (first, first + 1):
        loss = engine(sentences(index, engine.rank, engine.world))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(folder: Path, stage: int) -> tuple[Any, Any]:
    with make(stage, 0) as engine:
        train(engine, 0)
        engine.save(folder)
        return state(engine), train(engine, 2)


def load(folder: Path, stage: int) -> tuple[Any, Any]:
    with make(stage, 1) as engine:
        engine.load(folder)
        return state(engine), train(engine, 2)


@daily(("of", "to"), [((2, 3), (2, 2))], [((4, 2), (4, 2)), ((4, 3), (2, 1)), ((2, 1), (4, 3))])
def test_experts(pools: Pools, tmp_path: Path, of: tuple[int, int], to: tuple[int, int]) -> None:
    saved = pools(of[0]).run(save, tmp_path, of[1])
    loaded = pools(to[0]).run(load, tmp_path, to[1])
    for rank, (found, losses) in enumerate(loaded):
        expected = saved[rank % 2]  # ranks of one parity have the same experts
        assert differing(expected[0], found, f"rank {rank}") == []
        if of[0] == to[0]:
            assert losses == saved[rank][1]
