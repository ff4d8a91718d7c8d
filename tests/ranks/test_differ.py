"""The words for two ranks' collectives that began to differ."""

from __future__ import annotations

import pytest

from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.differ import ADVICE, MODULES, Issued, advice, explain, first_difference, next_collective


def marks(*issued: tuple[str, int]) -> list[Issued]:
    """The memory of a rank that issued gathers of these buckets in these calls."""
    ledger = Ledger(2, 0, {0: "a", 1: "b", 2: "c"})
    for call, bucket in issued:
        ledger.call = call
        ledger.record("all_gather", bucket, "float32", 64)
    return list(ledger.marks)


STEP = [("in forward", 0), ("in forward", 1), ("in backward", 1)]


@pytest.mark.oldest
def test_where_lists_begin_to_differ() -> None:
    assert first_difference(["a", "b"], ["a", "c", "d"], 0, 2) == "at 1, rank 0 has 'b' and rank 2 has 'c'"
    assert first_difference(["a"], ["a", "b"], 0, 3) == "at 1, rank 0 has 'nothing more' and rank 3 has 'b'"
    assert first_difference(["a"], ["a"], 0, 3) == "ranks 0 and 3 describe them alike"


def test_equal_collectives_have_no_difference() -> None:
    assert explain(0, marks(*STEP), 1, marks(*STEP)) == ""
    assert explain(0, marks(*STEP), 1, []) == ""
    assert explain(0, marks(*STEP), 1, marks(*STEP, ("in forward", 0))) == "", "one is behind"


def test_a_difference_within_a_call() -> None:
    told = explain(0, marks(*STEP, ("in forward", 0)), 1, marks(*STEP, ("in forward", 2)))
    here, there = "all_gather a, 64 bytes of float32", "all_gather c, 64 bytes of float32"
    assert told == f"their collective 4 was '{here}' on rank 0, '{there}' on rank 1"


def test_the_call_that_one_rank_made_alone_is_named_though_its_gathers_met_equal_ones() -> None:
    """Rank 0 has left state_dict when its gathers first meet others."""
    one = marks(*STEP, ("in state_dict", 0), ("in state_dict", 1), ("in forward", 0))
    two = marks(*STEP, ("in forward", 0), ("in forward", 1), ("in backward", 1))
    told = explain(0, one, 1, two)
    assert told.startswith(f"rank 0 was in state_dict where rank 1 was in forward ({ADVICE}); their collective 6 was ")
    assert explain(1, two, 0, one).startswith("rank 1 was in forward where rank 0 was in state_dict")


def test_only_what_both_remember_is_compared() -> None:
    one, two = marks(*STEP, ("in forward", 0)), marks(*STEP, ("in forward", 2))
    assert "collective 4" in explain(0, one[3:], 1, two[2:])


def test_a_difference_where_ranks_gather_what_they_enter() -> None:
    """What was entered is told: with a schedule, what is gathered is for later."""
    one, two = Ledger(2, 0, {0: "a", 1: "b"}, gathers_on_entry=True), Ledger(2, 1, {0: "a", 1: "b"})
    for ledger, module, bucket in ((one, "a", 1), (two, "b", 0)):
        ledger.entering(module)
        ledger.record("all_gather", bucket, "float32", 64)
    told = explain(0, one.marks, 1, two.marks, one.gathers_on_entry)
    assert "rank 0 had entered a last, rank 1 b" in told and MODULES in told
    assert MODULES not in explain(0, one.marks, 1, two.marks)


def test_a_backward_is_told_with_the_module_that_its_forward_ended_in() -> None:
    """A rank that left the last module out enters the same ones on its way back."""
    ledger = Ledger(2, 0)
    for module, back, told in (
        ("a", False, "a"),
        ("end", False, "end"),
        ("end", True, "end"),
        ("a", True, "a on the way back from end"),
        ("a", False, "a"),
    ):
        ledger.entering(module, back)
        assert ledger.module == told


def test_advice_for_ranks_in_different_places() -> None:
    gather = next_collective(4, "in forward", "blocks.0", "all_gather", "blocks.1")
    assert gather == "collective 4 in forward, having entered blocks.0: all_gather blocks.1"
    assert next_collective(1, "", "", "broadcast", "") == "collective 1: broadcast"
    other = next_collective(4, "in forward", "blocks.1", "all_gather", "blocks.2")
    assert MODULES in advice(gather, other)
    assert MODULES in advice("agreement of step 3", gather), "it left out the last one"
    assert advice(gather, "state_dict") == f": {ADVICE}"
    assert advice("state_dict", "agreement of step 3") == ""
