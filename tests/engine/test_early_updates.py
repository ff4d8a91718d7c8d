"""Graphs of whole steps update buckets beside the backward: where nothing has to be known of all gradients before."""

from __future__ import annotations

import pytest
import torch

from tests.support.beside import Side, late
from tests.support.graphs import on_cpu
from tests.support.marks import daily
from tests.support.replays import Case, batch_of, compared, micro_step, start, train
from zeroweave.optim.early import EarlyUpdates
from zeroweave.optim.norms import EarlyNorms
from zeroweave.schedule import Update

DEPTH = {"reduce": {"depth": 1}, "compile": {"prefetch": 1, "record_steps": 0}}
"""So that reductions settle in the backward, and no measured time has updates left for the end."""
EARLY = [
    *(Case(stage, gas, dropout=0.1, decay=True, config=DEPTH) for stage in (3, 2, 1) for gas in (1, 3)),
    Case(3, sizes=(4, 6), config=DEPTH),
    Case(3, frozen=True, config=DEPTH),
    Case(2, heads=True, config=DEPTH),
]
BESIDE = [
    Case(3, 2, config=DEPTH),
    Case(3, 2, config=DEPTH, heads=True),
    Case(2, config={**DEPTH, "precision": {"accumulate": "bfloat16"}}),
    Case(1, 4, config=DEPTH, dropout=0.1),
    Case(2, frozen=True, sizes=(4, 6), config=DEPTH),
]
CLIPPED = [
    Case(3, clipping=0.1, config=DEPTH),
    Case(2, 3, clipping=0.1, config=DEPTH, decay=True),
    Case(3, 2, overflow=20, clipping=0.1, config=DEPTH),
]
LATE = [
    Case(3, clipping=0.1, config=DEPTH),
    Case(3, overflow=20, config=DEPTH),
    Case(3, loop="plain", config=DEPTH),
    Case(2, config={**DEPTH, "on_nonfinite": "skip"}),
]


@daily("case", EARLY[:1], EARLY[1:], ids=str)
def test_updates_beside_the_backward_are_exact(case: Case) -> None:
    differs, graphed = compared(case)
    assert not differs
    assert graphed["captured"] == len(case.sizes) and not graphed["told"]
    assert graphed["early"] >= 2


@daily("case", BESIDE[2:3], [*BESIDE[:2], *BESIDE[3:]], ids=str)
def test_updates_as_late_as_their_stream_may_run_them_are_exact(case: Case) -> None:
    with late() as beside:
        differs, graphed = compared(case)
    assert not differs
    assert graphed["captured"] == len(case.sizes) and not graphed["told"]
    assert beside.operations > 2 and graphed["early"] >= 2


@daily("case", CLIPPED[:1], CLIPPED[1:], ids=str)
def test_norms_taken_as_late_as_their_stream_may_take_them_are_exact(case: Case) -> None:
    with late() as beside:
        differs, graphed = compared(case)
    assert not differs and set(train(case, graphs=False)["norms"]) != {None}
    assert graphed["captured"] == 1 and not graphed["told"]
    assert beside.operations > 2 and not graphed["early"]


def test_a_norm_of_what_a_gradient_was_before_is_not_used() -> None:
    gradients = {0: torch.ones(4), 1: torch.ones(9)}
    norms = EarlyNorms(gradients.get, None)
    norms.settled(0)
    norms.settled(1)
    gradients[0].mul_(2)
    assert [float(norm) for norm in norms.of(gradients)] == [4.0, 3.0]
    norms.settled(1)
    assert [float(norm) for norm in norms.of({1: torch.zeros(2)})] == [0.0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("forgets", "told"), [("pending", "its replay differs in optimizer state"), ("end", "unjoined work")]
)
def test_a_stream_that_nobody_waits_for_is_noticed(forgets: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the emulation above: it finds what it is there to find."""
    if forgets == "pending":  # nobody keeps the gradients
        pending = Side.pending
        monkeypatch.setattr(Side, "pending", lambda self, *alive: pending(self))
    else:
        monkeypatch.setattr(EarlyUpdates, "end", lambda self: frozenset(self._done))
    with late():
        if forgets == "pending":
            assert told in " ".join(train(Case(3, steps=16, config=DEPTH), graphs=True)["told"])
        else:
            with pytest.raises(AssertionError, match=told):
                train(Case(3, steps=16, config=DEPTH), graphs=True)


@daily("case", LATE[2:3], [*LATE[:2], *LATE[3:]], ids=str)
def test_what_needs_all_gradients_first_updates_behind_the_backward(case: Case) -> None:
    graphed = train(case, graphs=True)
    assert graphed["captured"] == 1 and graphed["replayed"] and not graphed["early"]


def test_without_a_graph_nothing_is_updated_before_the_ranks_agree() -> None:
    assert not train(Case(3, steps=6, config=DEPTH), graphs=False)["early"]


def test_each_bucket_is_updated_once() -> None:
    case = Case(3, 2, config=DEPTH)
    with on_cpu() as device:
        engine = start(case, graphs=True)
        device.serve(engine)
        for step in range(16):
            for micro in range(case.gas):
                micro_step(engine, case, batch_of(case, step, micro))
        assert engine.stats.replayed_steps
        updates = [i.bucket for i in engine.executed if isinstance(i, Update)]
        assert sorted(updates) == sorted(i.bucket for i in engine.schedule.instructions if isinstance(i, Update))
        engine.destroy()
