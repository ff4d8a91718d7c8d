"""What is told of a run on several ranks: by rank 0 alone, and of all of them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pools
from zeroweave.engine.logs.sinks import FILE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def logged(folder: str, stage: int) -> tuple[list[float], str]:
    """This rank's losses, and what it printed. Rank 1 has another shape in the last step."""
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    config = {
        "stage": stage,
        "log_dir": folder,
        "log": {"every": 2, "progress": True},
        "compile": {"lower": "aot_eager", "dynamic": False},
    }
    losses, printed = [], io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine,
    ):
        for step in range(4):
            rows = 2 if rank == 1 and step == 3 else 4
            ids = torch.arange(rows * 3).add(step + rank).remainder(16).view(rows, 3)
            losses.append(float(engine.train_step(ids)))
    return losses, printed.getvalue()


def test_rank_0_tells_of_all(pools: Pools, tmp_path: Path) -> None:
    (first, shown), (second, quiet) = pools(2).run(logged, str(tmp_path), 3)
    told: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    figures = [each for each in told if each["kind"] == "figures"]
    assert [each["step"] for each in figures] == [1, 2, 4] and told[0]["world"] == 2
    means = [(first[0] + second[0]) / 2, (first[1] + second[1]) / 2, (sum(first[2:]) + sum(second[2:])) / 4]
    for each, mean in zip(figures, means, strict=True):
        assert abs(each["loss"] - mean) < 1e-6
    tokens = [each["tokens_per_second"] * each["seconds"] for each in figures]
    assert [round(each, 3) for each in tokens] == [24, 24, 21]
    compiled = [each for each in told if each.get("event") == "recompiled"]
    assert compiled and {(each["rank"], each["step"]) for each in compiled} == {(1, 4)}, "rank 0 met no other shape"
    assert all("expected 4, actual 2" in each["reason"] for each in compiled)
    scheduled = [each for each in told if each.get("event") == "schedule"]
    assert [each["rank"] for each in scheduled] == [0] * len(scheduled) and scheduled, "what all ranks say is told once"
    assert not quiet and "step 4: loss" in shown and "step 4, rank 1: recompiled: " in shown
