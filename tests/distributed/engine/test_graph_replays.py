"""Ranks that replay their steps decide together, and send what ranks send that do not: by graphs on the CPU."""

from __future__ import annotations

import pytest

from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.replays import Case, compared

ROWS = [
    *(Case(stage, gas, loop, dropout=0.1) for stage in (1, 2, 3) for gas, loop in ((1, "plain"), (3, "train_step"))),
    Case(2, 2, "clipped", decay=True, overflow=20),
    *(Case(stage, 3, "busy", steps=64, dropout=0.1) for stage in (2, 3)),
    *(Case(stage, gas, "busy", steps=64) for stage, gas in ((1, 1), (2, 1), (3, 1))),
    *(Case(stage, 4, loop, dropout=0.1) for loop in ("coalesced", "no_sync") for stage in (1, 2, 3)),
    *(Case(stage, 2, loop, config={"bucket": {"by_block": 2}}) for stage, loop in ((1, "train_step"), (3, "plain"))),
]
UNEVEN = [Case(stage, gas, "uneven", dropout=0.1) for stage in (1, 2, 3) for gas in (1, 2)]


@daily("case", ROWS[2:3], [*ROWS[:2], *ROWS[3:]], ids=str)
def test_replayed_steps_are_exact(pools: Pools, case: Case) -> None:
    least = 1 if case.loop == "coalesced" else case.gas
    for differs, graphed in pools(2).run(compared, case):
        assert not differs and graphed["captured"] and graphed["replayed"] >= 8 * least, (differs, graphed)


@daily("case", [], UNEVEN, ids=str)
def test_what_one_rank_alone_does_ends_no_step(pools: Pools, case: Case) -> None:
    found = pools(2).run(compared, case)
    for differs, graphed in found:
        assert not differs and graphed["replayed"] >= 8 * case.gas, (differs, graphed)
    assert len({graphed["replayed"] for _, graphed in found}) == 1


@daily("stage", [2], [1, 3])
def test_a_capture_that_fails_changes_nothing(pools: Pools, stage: int) -> None:
    for differs, graphed in pools(2).run(compared, Case(stage, reads=True, dropout=0.1, steps=14)):
        assert not differs and not graphed["captured"], (differs, graphed)
        assert any("not permitted" in why for why in graphed["uncaptured"]), graphed["uncaptured"]


@pytest.mark.matrix
def test_three_ranks(pools: Pools) -> None:
    for differs, graphed in pools(3).run(compared, Case(3, 2, "plain", dropout=0.1)):
        assert not differs and graphed["replayed"] >= 16
