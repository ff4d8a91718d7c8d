"""Each pass before and after, on a few lines written by hand."""

from __future__ import annotations

from zeroweave.schedule import (
    PASSES,
    BucketFacts,
    Call,
    Facts,
    Free,
    Instruction,
    Reduce,
    Reshard,
    Run,
    Schedule,
    Settle,
    Unshard,
    Update,
    Wait,
)
from zeroweave.schedule.passes import free, insert, prefetch


def run(*uses: int, backward: bool = False) -> Run:
    return Run(Call("f", "backward" if backward else "forward"), uses)


def of(*instructions: Instruction, ahead: int = 1, frees: bool = False) -> Schedule:
    buckets = tuple(BucketFacts(i, "abcd"[i], 1, True) for i in range(4))
    return Schedule(instructions, (), Facts(buckets, frozenset(), 1, ahead, False, frees))


def test_insert_keeps_the_last_block_between_forward_and_backward() -> None:
    before = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Unshard(0), Wait(0), run(0, backward=True), Reshard(0)),
    )
    assert insert(before).instructions == (
        *(Unshard(0), Wait(0), run(0)),
        *(run(0, backward=True), Reshard(0)),
    )


def test_insert_looks_past_reductions_and_calls_without_buckets() -> None:
    before = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Settle(1), Reduce(2), run()),
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
    )
    assert insert(before).instructions == (
        *(Unshard(0), Wait(0), run(0)),
        *(Settle(1), Reduce(2), run()),
        *(run(0), Reshard(0)),
    )


def test_insert_drops_a_bucket_that_another_call_follows() -> None:
    schedule = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Unshard(1), Wait(1), run(1), Reshard(1)),
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
    )
    assert insert(schedule) is schedule


def test_insert_with_several_buckets_keeps_the_common_one() -> None:
    before = of(
        *(Unshard(0), Unshard(1), Wait(0), Wait(1), run(0, 1), Reshard(0), Reshard(1)),
        *(Unshard(1), Unshard(2), Wait(1), Wait(2), run(1, 2), Reshard(1), Reshard(2)),
    )
    assert insert(before).instructions == (
        *(Unshard(0), Unshard(1), Wait(0), Wait(1), run(0, 1), Reshard(0)),
        *(Unshard(2), Wait(2), run(1, 2), Reshard(1), Reshard(2)),
    )


PLAIN = (
    *(Unshard(0), Wait(0), run(0), Reshard(0)),
    *(Unshard(1), Wait(1), run(1), Reshard(1)),
    *(Unshard(2), Wait(2), run(2), Reshard(2)),
)


def test_prefetch_one_call_ahead() -> None:
    assert prefetch(of(*PLAIN)).instructions == (
        *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
        *(Unshard(2), Wait(1), run(1), Reshard(1)),
        *(Wait(2), run(2), Reshard(2)),
    )


def test_prefetch_two_calls_ahead() -> None:
    assert prefetch(of(*PLAIN, ahead=2)).instructions == (
        *(Unshard(0), Unshard(1), Unshard(2), Wait(0), run(0), Reshard(0)),
        *(Wait(1), run(1), Reshard(1)),
        *(Wait(2), run(2), Reshard(2)),
    )


def test_prefetch_nothing_ahead() -> None:
    schedule = of(*PLAIN, ahead=0)
    assert prefetch(schedule) is schedule


def test_prefetch_twice_is_once() -> None:
    once = prefetch(of(*PLAIN))
    assert prefetch(once) is once


def test_prefetch_stays_below_the_last_reshard_of_the_bucket() -> None:
    before = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Unshard(1), Wait(1), run(1), Reshard(1)),
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        ahead=3,
    )
    assert prefetch(before).instructions == (
        *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
        *(Unshard(0), Wait(1), run(1), Reshard(1)),
        *(Wait(0), run(0), Reshard(0)),
    )


def test_all_passes_keep_a_bucket_that_prefetch_would_gather_as_it_is_dropped() -> None:
    schedule = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Unshard(1), Wait(1), run(1), Reshard(1)),
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
    )
    for improve in PASSES:
        schedule = improve(schedule)
    assert schedule.instructions == (
        *(Unshard(0), Unshard(1), Wait(0), run(0)),
        *(Wait(1), run(1), Reshard(1)),
        *(run(0), Reshard(0)),
    )


def test_prefetch_stays_below_updates() -> None:
    before = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        Update(0),
        *(Unshard(1), Wait(1), run(1), Reshard(1)),
    )
    assert prefetch(before) is before


def test_prefetch_comes_after_the_reduction_of_the_call_before() -> None:
    before = of(
        *(Unshard(2), Wait(2), run(2, backward=True), Reshard(2), Reduce(2)),
        *(Unshard(1), Wait(1), run(1, backward=True), Reshard(1), Settle(2), Reduce(1)),
        *(Unshard(0), Wait(0), run(0, backward=True), Reshard(0)),
    )
    assert prefetch(before).instructions == (
        *(Unshard(2), Unshard(1), Wait(2), run(2, backward=True), Reshard(2), Reduce(2)),
        *(Unshard(0), Wait(1), run(1, backward=True), Reshard(1), Settle(2), Reduce(1)),
        *(Wait(0), run(0, backward=True), Reshard(0)),
    )


def test_prefetch_counts_a_stretch_of_calls_on_one_bucket_once() -> None:
    before = of(
        *(Unshard(0), Wait(0), run(0), Reshard(0)),
        *(Unshard(1), Wait(1), run(1), run(), run(1), Reshard(1)),
        *(Unshard(2), Wait(2), run(2), Reshard(2)),
    )
    assert prefetch(before).instructions == (
        *(Unshard(0), Unshard(1), Wait(0), run(0), Reshard(0)),
        *(Unshard(2), Wait(1), run(1), run(), run(1), Reshard(1)),
        *(Wait(2), run(2), Reshard(2)),
    )


def test_prefetch_counts_the_turn_to_the_backward() -> None:
    before = of(
        *(Unshard(1), Wait(1), run(1), Reshard(1)),
        *(Unshard(2), Wait(2), run(2), run(2, backward=True), Reshard(2)),
        *(Unshard(1), Wait(1), run(1, backward=True), Reshard(1)),
    )
    assert prefetch(before).instructions == (
        *(Unshard(1), Unshard(2), Wait(1), run(1), Reshard(1)),
        *(Wait(2), run(2), Unshard(1), run(2, backward=True), Reshard(2)),
        *(Wait(1), run(1, backward=True), Reshard(1)),
    )


def test_prefetch_leaves_second_holds_where_they_are() -> None:
    inner = (Unshard(0), Wait(0), run(0, 2), Reshard(0))
    before = of(Unshard(0), Wait(0), run(0), run(1), *inner, Reshard(0))
    assert prefetch(before) is before


def test_free_stands_before_the_first_update() -> None:
    step = (Unshard(0), Wait(0), run(0), Reshard(0), Reduce(0), Reduce(1), Settle(0))
    update = (Update(0), Settle(1), Update(1))
    after = free(of(*step, *update, frees=True))
    assert after.instructions == (*step, Free(), *update)
    assert after.text().splitlines()[-2:] == ["Settle a · Free · Update a", "Settle b · Update b"]
    assert after.of("a")[-1] == "Settle a · Free · Update a"
    assert free(after) == after
    for unchanged in (of(*step, *update), of(*step, frees=True)):
        assert free(unchanged) is unchanged
