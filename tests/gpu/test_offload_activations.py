"""Activations in pinned host memory: equal in every bit, less memory, and the host never waits for a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import activation_jobs

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("stage", "mode", "accumulate"), [(3, "inductor", 1), (2, "inductor", 2), (3, "eager", 2), (1, "aot_eager", 1)]
)
def test_memory_falls_and_nothing_else_changes(ranks: Ranks, stage: int, mode: str, accumulate: int) -> None:
    for found in ranks(activation_jobs.compare, stage, mode, accumulate):
        stay, move = found.stay, found.move
        assert found.equal, found
        assert move.followed and not move.on_demand, move
        assert not stay.moved and not stay.copies and move.copies, found
        assert move.gib_per_second > 1.0, move
        # Most of what the eight layers save: all but that of the last two and of what is small.
        assert move.moved >= 0.5 * stay.resident, found
        assert stay.resident - move.resident >= 0.9 * move.moved, found
        # While a layer's activations leave, those of the next one are there, too.
        assert stay.forward - move.forward >= 0.7 * move.moved, found
        assert move.host <= 1.05 * move.moved, found


@pytest.mark.parametrize("mode", ["inductor", "eager"])
def test_the_host_waits_for_no_copy(ranks: Ranks, mode: str) -> None:
    for stay, move in ranks(activation_jobs.waits, mode):
        assert all(move[phase] <= stay[phase] for phase in ("forward", "backward", "step")), (stay, move)
        assert move["forward"] == 0, move
