"""What `initialize` refuses on one rank only: the others are told, whatever it is, and wait for nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pool
from tests.support.marks import slow
from tests.support.zoo import Block, Stack, rows

DEADLINE = 300.0
REFUSED = {
    "config": ("ConfigError", "stag"),
    "model": ("ParameterError", "max_norm"),
    "optimizer": ("Error", "optimizer"),
    "scheduler": ("EngineError", "lr_scheduler"),
    "callable": ("KeyError", "no such rate"),
}


def no_rate(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise KeyError("no such rate")


def start(what: str, ranks: tuple[int, ...]) -> float:
    """`initialize` with something wrong on these ranks; the seconds that the error took."""
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    module.table = nn.Embedding(4, 4)
    config: dict[str, Any] = {"stage": 3, "compile": {"enabled": False}, "deadline_seconds": DEADLINE}
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler: Any = None
    if torch.distributed.get_rank() in ranks:
        if what == "config":
            config["stag"] = 2
        elif what == "model":
            module.table.max_norm = 1.0
        elif what == "optimizer":
            optimizer = torch.optim.SGD(Stack(lambda index: Block()).parameters(), lr=0.1)
        elif what == "scheduler":
            scheduler = "cosine"
        else:
            optimizer = no_rate
    begin = time.monotonic()
    try:
        zw.initialize(module, optimizer, config, lr_scheduler=scheduler).destroy()
    except (zw.ZeroweaveError, KeyError) as error:
        assert REFUSED[what][0] in type(error).__name__ and REFUSED[what][1] in str(error), error
        assert not hasattr(error, "__notes__") or ranks != (0, 1), "all ranks failed alike"
        return time.monotonic() - begin
    return -1.0


@slow("config-0")
@pytest.mark.parametrize(
    ("what", "rank"),
    [
        ("config", 0),
        ("optimizer", 1),
        *(pytest.param(what, 1, marks=pytest.mark.matrix) for what in ("config", "model", "scheduler", "callable")),
        pytest.param("model", 0, marks=pytest.mark.matrix),
    ],
)
def test_the_other_rank_is_told(disposable: Callable[[int], Pool], what: str, rank: int) -> None:
    outcomes = disposable(2).outcomes(start, what, (rank,), deadline=120.0)
    assert 0.0 <= outcomes[rank].value < DEADLINE, outcomes[rank].describe()
    other = outcomes[1 - rank]
    kind, text = REFUSED[what]
    assert other.failed, other.describe()
    said = other.stderr + other.message
    assert f"rank {rank} failed in initialize at step 0: " in said and kind in said and text in said, other.describe()


def refused_everywhere(whats: tuple[str, ...]) -> bool:
    for what in whats:
        assert start(what, (0, 1)) >= 0.0
    with zw.initialize(Stack(lambda index: Block()), None, {"stage": 3, "compile": {"enabled": False}}) as engine:
        return bool(engine(rows(0, 0)[0]).isfinite().all())


def test_what_all_ranks_refuse_ends_nobody(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(refused_everywhere, tuple(REFUSED)) == [True, True]
