"""A planned rank is the engine's own: the same record, instructions and bytes as an engine's that really trains."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import torch

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave.config import Config
from zeroweave.demo import Llama, LlamaConfig
from zeroweave.plan.hardware import GPUS, Efficiency, Hardware
from zeroweave.plan.rank import PlannedRank

SIZES = LlamaConfig(vocabulary=50, width=24, hidden=36, layers=2, heads=2, max_length=16)
HARDWARE = Hardware(GPUS["h200"], Efficiency())
DAILY = [(3, "eager", 2)]


def config(stage: int, mode: str) -> dict[str, Any]:
    compiled = {"enabled": False} if mode == "eager" else {"lower": mode}
    return {"stage": stage, "precision": {"params": "bfloat16"}, "compile": {"prefetch": 1, **compiled}}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def tokens() -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.long)


def train(stage: int, mode: str) -> dict[str, Any]:
    with zw.initialize(Llama(SIZES), optimizer, config(stage, mode)) as engine:
        for _ in range(3):
            engine.train_step({"input_ids": tokens(), "labels": tokens()})
        return {
            "memory": asdict(engine.stats.memory),
            "executed": engine.executed,
            "record": engine.schedule.record,
            "optimizer": sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values()),
        }


def planned(stage: int, mode: str, world: int) -> PlannedRank:
    with torch.device("meta"):
        model, ids = Llama(SIZES), tokens()
    batch = {"input_ids": ids, "labels": ids}
    rank = PlannedRank(model, batch, optimizer, Config.load(config(stage, mode)), world, HARDWARE)
    rank.measure()
    return rank


@daily(
    ("stage", "mode", "world"),
    DAILY,
    [row for row in product((1, 2, 3), ("eager", "aot_eager"), (1, 2)) if row not in DAILY],
)
def test_a_plan_has_the_record_the_instructions_and_the_bytes_of_an_engine(
    pools: Pools, stage: int, mode: str, world: int
) -> None:
    real = pools(world).run(train, stage, mode)[0]
    rank = planned(stage, mode, world)
    assert rank.first.record == real["record"]
    assert rank.first.instructions == real["executed"]
    assert asdict(rank.memory) == real["memory"]
    assert rank.memory.optimizer == real["optimizer"]
