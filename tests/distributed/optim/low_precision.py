"""A model, its optimizer and losses that now and then are too large for float16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.marks import MODES
from tests.support.zoo import Block, Entry, Stack, regression, rows

STAGES = (1, 2, 3)
DTYPES: dict[str, dict[str, Any]] = {
    "float16": {"params": "float16", "loss_scale": 16},
    "bfloat16": {"params": "bfloat16"},
    "float32": {},
}


def rows_of(daily: list[tuple[Any, ...]], *factors: Iterable[Any]) -> list[Any]:
    """The product of the factors; what is not in `daily` belongs to the matrix."""
    product = list(itertools.product(*factors))
    assert set(daily) <= set(product)
    return [row if row in daily else pytest.param(*row, marks=pytest.mark.matrix) for row in product]


MLP = Entry("mlp", lambda: Stack(lambda index: Block(), depth=2), rows, regression)


def settings(stage: int, mode: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "compile": MODES[mode], "deadline_seconds": 200.0, **more}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def plan(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def boost(rank: int, index: int) -> float:
    """What the loss of a micro-step is multiplied by: now and then, on one rank alone or on both, too much."""
    alone, both = index % 17 == 5 and rank == (index // 17) % 2, index % 29 == 8
    return 2.0**14 if alone or both else 1.0


def loss_of(call: Callable[[Tensor], Tensor], index: int, dtype: torch.dtype, factor: float | None = None) -> Tensor:
    rank = dist.get_rank()
    x, y = rows(rank, index)
    return F.mse_loss(call(x.to(dtype)).float(), y) * 4 * (boost(rank, index) if factor is None else factor)
