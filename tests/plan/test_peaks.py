"""What is foreseen of a schedule's memory is what it takes, of every tensor, when a rank follows it.

All that no pass moves counts where it occurs: reduced gradients, local sums, copies to and from host memory, what an
update needs for itself. What a reduction holds beside its flat, such as the gradients that were copied or cast into it,
counts until it is settled. Offloaded states come earlier and go later where memory is free. So what is foreseen is the
first step after a change of the schedule. Later steps find out by themselves what is free.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.test_plan import HARDWARE
from zeroweave.config import Config
from zeroweave.demo import Llama, LlamaConfig
from zeroweave.eager import chunked_loss
from zeroweave.plan.model import source_of
from zeroweave.plan.rank import Measured, PlannedRank
from zeroweave.schedule import Schedule

pytestmark = pytest.mark.matrix

CAST = {"precision": {"params": "bfloat16", "reduce": "float32"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": CAST,
    "bfloat16": {"precision": {"params": "bfloat16"}},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
    "optimizer": {"offload": {"optimizer": "all"}},
    "activations": {"offload": {"activations": True, "activations_threshold_bytes": 64}},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1, "gradient_accumulation_steps": 2},
    "chunked": {"loss": "chunked"},
    "chunked and cast": {"loss": "chunked", **CAST, "gradient_accumulation_steps": 2},
    "compiled": {**CAST, "compile": {"lower": "inductor"}},
}


def decoder() -> tuple[nn.Module, Any]:
    tokens = torch.zeros(2, 64, dtype=torch.long)
    shape = LlamaConfig(vocabulary=500, width=128, hidden=256, layers=4, heads=2, max_length=64)
    return Llama(shape), {"input_ids": tokens, "labels": tokens}


def peak_of(rank: PlannedRank, schedule: Schedule) -> int:
    """Bytes of the device at most while a rank follows it."""
    rank._clock.restart_peak()
    rank._step(schedule)
    return rank._clock.peak()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_schedule_takes_what_was_foreseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "BYTES", 4 * 2000 * 64)  # 64 of 512 tokens
    config = Config.load({"stage": 3, "compile": {"enabled": False}, **SETTINGS[name]})

    def measured() -> tuple[PlannedRank, Measured]:
        model, batch = source_of("tests.plan.models:language", 1, 512)() if "chunked" in name else decoder()
        rank = PlannedRank(model, batch, torch.optim.AdamW, config, 2, HARDWARE)
        return rank, rank.measure(room=1 << 40)

    rank, found = measured()
    travels = config.offload.optimizer != "none"
    changes: list[dict[str, Any]] = [
        {"prefetch": 3, "keep": "none"},
        {"memory_budget": "none"},
        {"keep": "all"},
        {"memory_budget": int(1.1 * found.costs.peak)},
        {},
    ]
    for change in changes:
        if travels:  # what is free now depends on the schedules before
            rank, found = measured()
        plan = found.plan(**change)
        taken = peak_of(rank, plan.schedule)
        assert 0.999 * taken <= plan.peak <= 1.001 * taken, (change, plan.peak, taken)
        later = max(peak_of(rank, plan.schedule) for _ in range(4)) if travels else taken
        assert later <= 1.1 * plan.peak, "within what a plan promises"
