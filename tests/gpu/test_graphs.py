"""Steps as CUDA graphs: the same numbers, bit by bit, and what cannot be a graph trains as ever and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import graph_jobs
from tests.gpu.graph_jobs import Case
from zeroweave.engine.graphs.away import Away, put_back

Ranks = Callable[..., list[Any]]

BY_COPY_ENGINE: dict[str, Any] = {"transport": {"gathers": "copy_engine"}}
ADDED: dict[str, Any] = {"precision": {"accumulate": "bfloat16"}}
"""Backwards add their gradients to the local sums themselves."""
EXACT = [
    *(Case(stage, gas, delays=True) for stage in (1, 2, 3) for gas in (1, 4)),
    *(Case(stage, mode="inductor", clipping=0.5, schedule=True) for stage in (2, 3)),
    *(Case(stage, gas, dtype="float16", clipping=1.0, schedule=True, overflow=30) for stage, gas in [(1, 4), (3, 1)]),
    Case(2, 4, dtype="float16", overflow=31, dropout=0.1, delays=True),
    *(Case(stage, gas, dropout=0.2) for stage, gas in [(1, 1), (2, 1), (3, 4)]),
    Case(3, mode="eager", dropout=0.1),
    Case(3, optimizer="sgd"),
    Case(2, 4, dtype="float16", overflow=31, optimizer="lion"),
    Case(2, optimizer="capturable", schedule=True),
    Case(3, lengths=(64, 48)),
    Case(2, more={"precision": {"reduce": "float32"}}),
    Case(2, 4, schedule=True, more={"precision": {"optimizer": "compact"}}),
    Case(3, mode="inductor", clipping=0.5, more={"precision": {"optimizer": "compact"}}),
    *(
        Case(stage, gas, heads=True, delays=True, clipping=0.5 if gas > 1 else None)
        for stage in (2, 3)
        for gas in (1, 2)
    ),
    Case(3, mode="inductor", loop="plain", heads=True),
    *(Case(stage, heads=True, delays=True, more=BY_COPY_ENGINE) for stage in (2, 3)),
    Case(3, dtype="float16", overflow=30, heads=True, schedule=True),
    *(Case(stage, gas, loop="plain", delays=True) for stage in (1, 2, 3) for gas in (1, 4)),
    *(Case(stage, 2, loop="clipped", model="Rich", schedule=True) for stage in (2, 3)),
    Case(3, 4, loop="plain", dtype="float16", clipping=1.0, overflow=30, dropout=0.1, schedule=True),
    Case(2, loop="plain", mode="inductor", dropout=0.1),
    *(Case(3, loop=loop, mode="eager", dtype="float32", dropout=0.1) for loop in ("cast", "cast around")),
    *(Case(stage, 4, loop=loop, delays=True) for stage in (1, 2, 3) for loop in ("coalesced", "no_sync")),
    Case(1, 4, loop="plain", delays=True, more=ADDED),
    Case(2, 4, loop="coalesced", delays=True, more=ADDED),
    Case(3, 4, loop="no_sync", delays=True, more=ADDED),
    Case(2, 4, mode="inductor", loop="coalesced", more=ADDED),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_captured_steps_are_exact(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        steps = case.steps * (1 if case.loop == "coalesced" else case.gas)
        assert run.captured == len(case.lengths) and run.replayed >= steps // 2, run.uncaptured
        assert not run.told and len(set(run.collectives[-20:])) == 1, run
        assert 0 < run.held < torch.cuda.get_device_properties(0).total_memory
        if case.overflow is not None:
            assert run.skipped == 1


UNTIMED: dict[str, Any] = {"reduce": {"depth": 1}, "compile": {"prefetch": 1, "record_steps": 0}}
"""Reductions settle in the backward, and no measured time has updates left for the end."""
EARLY = [
    *(Case(stage, gas, delays=True, more=UNTIMED) for stage in (1, 2, 3) for gas in (1, 4)),
    Case(3, mode="inductor", more=UNTIMED),
    Case(3, heads=True, delays=True, more=UNTIMED),
    Case(2, optimizer="capturable", more=UNTIMED),
    Case(3, optimizer="sgd", lengths=(64, 48), more=UNTIMED),
    Case(3, more={**UNTIMED, "precision": {"optimizer": "compact"}}),
    Case(2, more={**UNTIMED, "precision": {"master": "float32", "reduce": "float32"}}),
]


@pytest.mark.parametrize("case", EARLY, ids=str)
def test_updates_beside_the_backward_are_exact(ranks: Ranks, case: Case) -> None:
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        assert run.captured == len(case.lengths) and run.replayed >= case.steps * case.gas // 2, run.uncaptured
        assert run.early >= 3 and not run.told, run


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("heads", "more"), [(False, {}), (True, {}), (True, BY_COPY_ENGINE)])
def test_whatever_else_a_program_does_between_captured_steps_is_exact(
    ranks: Ranks, stage: int, heads: bool, more: dict[str, Any]
) -> None:
    for differs, run in ranks(graph_jobs.compared, Case(stage, loop="busy", steps=70, heads=heads, more=more)):
        assert not differs
        assert run.captured >= 2 and run.replayed >= 25, run.uncaptured


@pytest.mark.parametrize("stage", [2, 3])
def test_a_capture_that_has_failed_leaves_nothing_behind(ranks: Ranks, stage: int) -> None:
    """Random numbers are drawn, and windows of other shapes are captured, as if it had not been."""
    case = Case(
        stage, mode="eager", model="Early", loop="relieved", dropout=0.1, lengths=(64,) * 20 + (48,) * 60, steps=80
    )
    for differs, run in ranks(graph_jobs.compared, case):
        assert not differs
        assert any("not permitted" in why for why in run.uncaptured), run.uncaptured
        assert run.captured == 1 and run.replayed >= 30, run.uncaptured


def test_statistics_may_be_read_as_often_as_one_likes(ranks: Ranks) -> None:
    for read in ranks(graph_jobs.pool_read_often, Case(2, steps=20)):
        assert set(read) == {read[0]} and read[0] > 0, read


REFUSED = [
    (Case(3, model="Reading"), "operation not permitted"),
    (Case(3, model="Coined"), "random numbers on the CPU"),
    (Case(2, model="Counting"), "does not compute the same twice"),
    (Case(3, optimizer="plain"), "fused=True"),
    (Case(3, more={"offload": {"optimizer": "all"}}), "offload"),
]


@pytest.mark.parametrize(("case", "why"), REFUSED, ids=str)
def test_what_cannot_be_captured_trains_as_ever_and_is_told_once(ranks: Ranks, case: Case, why: str) -> None:
    for rank, (differs, run) in enumerate(ranks(graph_jobs.compared, case)):
        assert run.replayed == 0 and any(why in reason for reason in run.uncaptured), run.uncaptured
        assert case.model == "Counting" or not differs  # its capture is one call more
        assert len(run.told) == (rank == 0) and (rank or why in run.told[0]), run.told


def test_copies_that_wait_in_host_memory_are_pinned() -> None:
    now = [torch.randn(80_000_000, device="cuda"), torch.arange(5, device="cuda"), torch.ones(3, 4, device="cuda").t()]
    before, away = [tensor.clone() for tensor in now], Away(now[0].device)
    copies = [away.copy(tensor) for tensor in now]
    assert [[piece.is_pinned() for piece in pieces] for pieces in copies] == [[True, True], [True], [False]]
    for tensor, pieces in zip(now, copies, strict=True):
        tensor.zero_()
        put_back(tensor, pieces)
    assert all(map(torch.equal, now, before))
