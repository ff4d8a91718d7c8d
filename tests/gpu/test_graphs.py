"""Training with graphs of calls: the same numbers, bit by bit, as without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import graph_jobs
from tests.gpu.graph_jobs import Case

Ranks = Callable[..., list[Any]]
CASES = [
    *(Case(stage, gas, dropout=0.1) for stage in (1, 2, 3) for gas in (1, 4)),
    Case(3, mode="inductor", dropout=0.1, lengths=(64, 96, 32), steps=60),
    Case(3, 2, loop="clipped", schedule=True),
    Case(2, dtype="float16", overflow=20, clipping=0.5),
    Case(3, 4, loop="coalesced"),
    Case(2, 4, loop="no_sync"),
    Case(2, loop="busy", steps=70),
    Case(3, loop="busy", steps=70, dropout=0.1),
    Case(3, loop="cast"),
    Case(3, loop="cast around"),
    Case(3, more={"offload": {"optimizer": "all"}}, optimizer="plain"),
    Case(3, 2, more={"offload": {"activations": True, "activations_threshold_bytes": 1024}}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_the_same(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        assert run.graphed > case.steps, run.ungraphed
