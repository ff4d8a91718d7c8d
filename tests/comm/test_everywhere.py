"""What must be so on all ranks."""

from __future__ import annotations

from zeroweave.comm.everywhere import why_not_local


def test_each_rank_is_told_what_separates_it_from_those_before() -> None:
    assert why_not_local([("one", "a"), ("one", "b")]) == ["", ""]
    assert why_not_local([("one", "a"), ("two", "b"), ("one", "a"), ("one", "c")]) == [
        "",
        "rank 1 is on two, rank 0 on one: it works inside one machine",
        "ranks 0 and 2 share a GPU",
        "",
    ]
