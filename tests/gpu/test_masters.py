"""Masters and updates by kernels: split masters are float32 masters, bit by bit, and kernels do what optimizers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.graph_jobs import Case, equal, train
from tests.gpu.jobs import deterministic

Ranks = Callable[..., list[Any]]
CASES = [
    *(Case(stage, gas) for stage in (1, 2, 3) for gas in (1, 4)),
    Case(3, clipping=0.5, schedule=True, steps=200),
    Case(2, optimizer="sgd"),
    Case(3, optimizer="lion"),
    Case(3, optimizer="capturable"),
    Case(3, optimizer="plain", mode="inductor"),
    Case(2, more={"precision": {"reduce": "float32"}}),
    Case(3, more={"offload": {"optimizer": "all"}}, optimizer="plain"),
]


def differing(case: Case, graphs: bool) -> str:
    """What differs between a run with split masters and one without; "" for nothing."""
    wide = replace(case, more={**case.more, "precision": {**case.more.get("precision", {}), "master": "float32"}})
    with deterministic():
        return equal(train(case, graphs), train(wide, graphs))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_masters_are_float32_masters(ranks: Ranks, case: Case, graphs: bool) -> None:
    assert ranks(differing, case, graphs) == ["", ""]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_rows_run_here() -> None:
    """tests/triton_kernels compares each kernel with torch, on this GPU."""
    assert pytest.main(["-q", "-p", "no:cacheprovider", "tests/triton_kernels"]) == 0
