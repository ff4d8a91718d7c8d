"""A planned rank is the engine's own: the same record, instructions and bytes as an engine's that really trains."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import torch

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from zeroweave.config import Config
from zeroweave.demo import Llama, LlamaConfig
from zeroweave.plan.hardware import GPUS, Efficiency, Hardware
from zeroweave.plan.rank import Measured, PlannedRank

SIZES = LlamaConfig(vocabulary=50, width=24, hidden=36, layers=2, heads=2, max_length=16)
HARDWARE = Hardware(GPUS["h200"], Efficiency())
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states away": {"offload": {"optimizer": "all"}},
    "params away": {"offload": {"params": True}},
    "both away": {"offload": {"optimizer": "all", "params": True}},
    "activations away": {"offload": {"activations": True, "activations_threshold_bytes": 256}},
    "compact": {"precision": {"params": "bfloat16", "optimizer": "compact"}},
    "compact and away": {
        "precision": {"params": "bfloat16", "optimizer": "compact"},
        "offload": {"optimizer": "all"},
    },
    "clipped": {"gradient_clipping": 1.0},
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated and away": {"gradient_accumulation_steps": 3, "offload": {"optimizer": "all"}},
    "all": {
        "offload": {"optimizer": "all", "params": True, "activations": True, "activations_threshold_bytes": 256},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
    },
}
"""What of a config stands beside stage, precision and compile, by a name."""
DAILY = [(3, "eager", 2, "plain"), (3, "eager", 2, "all")]
MODES = [row for row in product((1, 2, 3), ("eager", "aot_eager"), (1, 2), ("plain",)) if row not in DAILY]
REST = [
    (stage, mode, 2, extra)
    for stage, mode, extra in product((1, 2, 3), ("eager", "aot_eager"), EXTRAS)
    if extra != "plain" and (stage == 3 or "params" not in EXTRAS[extra].get("offload", {}))
]


def config(stage: int, mode: str, extra: str) -> dict[str, Any]:
    compiled = {"enabled": False} if mode == "eager" else {"lower": mode}
    base = {"stage": stage, "precision": {"params": "bfloat16"}, "compile": {"prefetch": 1, **compiled}}
    return {**base, **EXTRAS[extra]}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def tokens() -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.long)


def train(stage: int, mode: str, extra: str) -> dict[str, Any]:
    settings = Config.load(config(stage, mode, extra))
    with zw.initialize(Llama(SIZES), optimizer, settings) as engine:
        for _ in range(3 * settings.gradient_accumulation_steps):
            engine.train_step({"input_ids": tokens(), "labels": tokens()})
        stats = engine.stats
        return {
            "memory": asdict(stats.memory),
            "executed": engine.executed,
            "record": engine.schedule.record,
            "optimizer": sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values()),
            "offloaded": stats.offloaded_peak,
        }


def planned(stage: int, mode: str, world: int, extra: str) -> Measured:
    with torch.device("meta"):
        model, ids = Llama(SIZES), tokens()
    batch = {"input_ids": ids, "labels": ids}
    return PlannedRank(model, batch, optimizer, Config.load(config(stage, mode, extra)), world, HARDWARE).measure()


@slow("3-eager-2-all")
@daily(("stage", "mode", "world", "extra"), DAILY, [row for row in MODES + REST if row not in DAILY])
def test_a_plan_has_the_record_the_instructions_and_the_bytes_of_an_engine(
    pools: Pools, stage: int, mode: str, world: int, extra: str
) -> None:
    real = pools(world).run(train, stage, mode, extra)[0]
    found = planned(stage, mode, world, extra)
    assert found.first.record == real["record"]
    assert found.first.instructions == real["executed"]
    assert asdict(found.memory) == real["memory"]
    coded = extra.startswith("compact")
    assert found.memory.optimizer == real["optimizer"] or coded, "codes are no tensors of the optimizer's"
    assert found.host == found.memory.host + real["offloaded"]
    offload = EXTRAS[extra].get("offload", {})
    assert (found.memory.host_optimizer > 0) == (offload.get("optimizer") == "all")
    assert (found.memory.host_shards > 0) == bool(offload.get("params"))
    assert (found.host > found.memory.host) == bool(offload.get("activations"))
