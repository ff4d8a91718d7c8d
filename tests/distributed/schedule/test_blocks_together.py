"""Several blocks in one bucket (`bucket.by_block` of 2 and more): the same numbers, by fewer gathers and reductions."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from tests.support.parity import digest
from tests.support.zoo import Block, Stack, rows


def train(stage: int, mode: str, gas: int, by_block: int) -> tuple[list[str], list[str], Counter[str], int]:
    """The parameters behind each step, the names of buckets, what the last schedule sends, and the departures."""
    torch.manual_seed(3)
    module = Stack(lambda index: Block(), depth=5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    config: dict[str, Any] = {
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "bucket": {"by_block": by_block},
        "compile": MODES[mode],
    }
    with zw.initialize(module, optimizer, config) as engine:
        digests = []
        for index in range(7):
            for micro in range(gas):
                x, y = rows(engine.rank, gas * index + micro)
                engine.backward(F.mse_loss(engine(x), y))
                engine.step()
            with engine.full_parameters() as full:
                digests.append(digest([{name: value.detach().clone() for name, value in full.items()}]))
        sent = Counter(kind for kind, _ in engine.schedule.collectives())
        return digests, [bucket.name for bucket in engine.buckets], sent, engine.stats.departures


@daily(
    ("stage", "mode", "gas"),
    [(3, "eager", 1)],
    [row for row in itertools.product((1, 2, 3), MODES, (1, 2)) if row != (3, "eager", 1)],
)
def test_blocks_together_train_alike(pools: Pools, stage: int, mode: str, gas: int) -> None:
    def run(by_block: int) -> tuple[list[str], list[str], Counter[str], int]:
        ranks = pools(2).run(train, stage, mode, gas, by_block)
        assert ranks[0] == ranks[1]
        return ranks[0]

    digests, names, sent, departures = run(1)
    assert len(set(digests)) == len(digests) and departures == 0
    assert names == ["enter", *(f"blocks.{index}" for index in range(5)), "leave"]
    for by_block, blocks in ((2, ["blocks.0-1", "blocks.2-3", "blocks.4"]), (5, ["blocks.0-4"])):
        found, together, fewer, departed = run(by_block)
        assert found == digests and departed == 0
        assert together == ["enter", *blocks, "leave"]
        saved = len(names) - len(together)
        gathers = gas * (2 if stage == 3 else 0) or 1  # of each bucket in a window, were it not for the last ones
        assert sent["all_gather"] - fewer["all_gather"] == gathers * saved
        assert sent["reduce_scatter"] - fewer["reduce_scatter"] == saved * (gas if stage > 1 else 1)


@pytest.mark.parametrize("by_block", [0, -1])
def test_no_block_is_no_bucket(by_block: int) -> None:
    with pytest.raises(zw.ConfigError, match=f"bucket.by_block must be .*, not {by_block}"):
        zw.Config.load({"bucket": {"by_block": by_block}})
