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
    if graphs and (case.optimizer == "plain" or "offload" in case.more):
        pytest.skip("no graph can hold these steps")
    assert ranks(differing, case, graphs) == ["", ""]


def by_kernels(case: Case) -> tuple[int, float]:
    """How many ranges were updated by kernels, and how far the losses are from those of torch's own steps."""
    import zeroweave.optim.onepass as onepass

    with deterministic():
        passed = train(case, False)
        rules, onepass.RULES = onepass.RULES, {}  # type: ignore[misc]
        try:
            stepped = train(case, False)
        finally:
            onepass.RULES = rules  # type: ignore[misc]
    return len(rules), max(abs(a - b) / abs(b) for a, b in zip(passed.losses, stepped.losses, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain", "capturable"])
def test_losses_are_those_of_torchs_own_steps(ranks: Ranks, optimizer: str) -> None:
    """float32, so that nothing rounds an update away: some units of the last place, a few dozen steps long."""
    for _, apart in ranks(by_kernels, Case(2, dtype="float32", optimizer=optimizer, steps=30)):
        assert 0 <= apart < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_rows_run_here() -> None:
    """tests/triton_kernels compares each kernel with torch, on this GPU."""
    assert pytest.main(["-q", "-p", "no:cacheprovider", "tests/triton_kernels"]) == 0
