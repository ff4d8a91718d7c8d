"""The replay where a step does not do what was recorded: nothing is freed under a call, no gradient goes early."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.runtime.playing import ITEM, Player
from zeroweave.runtime.timeline import Record
from zeroweave.schedule import (
    BucketFacts,
    Call,
    Costs,
    Entered,
    Event,
    Facts,
    Left,
    Line,
    Micro,
    Ready,
    Reduce,
    Reshard,
    Run,
    Settle,
    compile_schedule,
)

X, Y = Call("x", "backward"), Call("y", "backward")
FREE = Costs((), {}, {}, {}, Line(), Line(), ())


def facts(buckets: int = 2, prefetch: int = 0) -> Facts:
    return Facts(
        tuple(BucketFacts(i, "abcd"[i], 8 * ITEM, True) for i in range(buckets)),
        kept_by_stage=frozenset(),
        depth=2,
        prefetch=prefetch,
        update_by_bucket=False,
    )


def following(record: tuple[Event, ...]) -> Player:
    """In the middle of a backward that follows the schedule of `record`."""
    player = Player(facts(), FREE)
    player.runtime.next_window(compile_schedule(record, player.facts))
    player.runtime.replay.backward_began(True)
    return player


def resident(player: Player) -> set[int]:
    return {bucket.id for bucket in player.runtime.buckets.values() if bucket.resident}


def finish(player: Player) -> list[int]:
    """Ends backward and step; the buckets that were reduced, in order."""
    replay = player.runtime.replay
    replay.backward_ended(True)
    player.runtime.gradients.end_backward()
    replay.finish(player._update, frozenset())
    assert not resident(player)
    return [bucket for kind, bucket, *_ in player.transport.calls if kind == "reduce_scatter"]


ONE_AFTER_THE_OTHER = (Entered(X, (0,)), Left(X), Ready(1), Entered(Y, (1,)), Left(Y), Ready(0), Micro())


def test_a_gradient_that_is_complete_early_is_not_reduced_under_a_call() -> None:
    """Bucket 1 has its turn when X has been left: reduced while X runs, it would drop what X reads."""
    player = following(ONE_AFTER_THE_OTHER)
    replay = player.runtime.replay
    player.deliver(1)
    replay.entered(X, (0,))
    assert resident(player) == {0}
    assert Reduce(1) not in replay.executed
    replay.left(X)
    assert replay.executed.index(Reshard(0)) < replay.executed.index(Reduce(1))
    replay.entered(Y, (1,))
    replay.left(Y)
    player.deliver(0)
    assert finish(player) == [1, 0]
    assert replay.departures == 0


def test_a_gradient_that_is_complete_inside_a_call_waits_for_its_end() -> None:
    player = following(ONE_AFTER_THE_OTHER)
    replay = player.runtime.replay
    replay.entered(X, (0,))
    player.deliver(1)
    assert resident(player) == {0}
    replay.left(X)
    assert Reduce(1) in replay.executed
    replay.entered(Y, (1,))
    replay.left(Y)
    player.deliver(0)
    assert finish(player) == [1, 0]
    assert replay.departures == 0


def test_a_call_that_has_come_to_lie_inside_another_departs() -> None:
    """The schedule drops bucket 0 before Y; X, around Y this time, reads it until its own end."""
    player = following(ONE_AFTER_THE_OTHER)
    replay = player.runtime.replay
    replay.entered(X, (0,))
    player.deliver(1)
    replay.entered(Y, (1,))
    assert resident(player) == {0, 1}
    assert replay.departures == 1
    replay.left(Y)
    assert resident(player) == {0}
    replay.left(X)
    player.deliver(0)
    assert sorted(finish(player)) == [0, 1]


def test_a_call_that_ends_before_the_one_inside_it_departs() -> None:
    player = following((Entered(X, (0,)), Entered(Y, (1,)), Left(Y), Left(X), Ready(0), Ready(1), Micro()))
    replay = player.runtime.replay
    replay.entered(X, (0,))
    replay.left(X)
    assert not resident(player)
    replay.entered(Y, (1,))
    assert replay.departures == 1
    assert resident(player) == {1}
    replay.left(Y)
    player.deliver(0)
    player.deliver(1)
    assert finish(player) == [0, 1]


def test_the_end_of_a_later_call_of_the_same_name_asks_for_no_reduction() -> None:
    """Bucket 0 is complete after the first X, bucket 1 inside the second, which therefore has an End."""
    record = (Entered(X, (0,)), Left(X), Ready(0), Entered(X, (0,)), Ready(1), Left(X), Micro())
    player = following(record)
    replay = player.runtime.replay
    replay.entered(X, (0,))
    replay.left(X)
    assert Reduce(0) not in replay.executed
    player.deliver(0)
    replay.entered(X, (0,))
    player.deliver(1)
    replay.left(X)
    assert finish(player) == [0, 1]
    assert replay.departures == 0


def test_a_settle_comes_with_the_next_event() -> None:
    """It may wait, and what the program computes until then needs nothing of it."""
    record = (Entered(X, (0,)), Ready(0), Left(X), Entered(Y, (1,)), Left(Y), Ready(1), Micro())
    player = Player(Facts(facts().buckets, frozenset(), 1, 0, False), FREE)
    player.runtime.next_window(compile_schedule(record, player.facts))
    replay = player.runtime.replay
    replay.backward_began(True)
    replay.entered(X, (0,))
    player.deliver(0)
    replay.left(X)
    replay.entered(Y, (1,))
    replay.left(Y)
    assert Settle(0) not in replay.executed
    player.deliver(1)
    assert replay.executed[-2:] == [Settle(0), Reduce(1)]
    assert finish(player) == [0, 1]


def swapped(player: Player) -> None:
    first_left_out(player)
    player.runtime.replay.entered(X, (0,))
    player.runtime.replay.left(X)


def first_left_out(player: Player) -> None:
    player.runtime.replay.entered(Y, (1,))
    player.runtime.replay.left(Y)


def last_left_out(player: Player) -> None:
    player.runtime.replay.entered(X, (0,))
    player.runtime.replay.left(X)


def all_left_out(player: Player) -> None:
    return None


def twice(player: Player) -> None:
    for _ in range(2):
        player.runtime.replay.entered(X, (0,))
        player.runtime.replay.left(X)
    player.runtime.replay.entered(Y, (1,))
    player.runtime.replay.left(Y)


@pytest.mark.parametrize(
    ("calls", "departs"),
    [(swapped, True), (twice, True), (first_left_out, False), (last_left_out, False), (all_left_out, False)],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_gradient_is_reduced_once_whatever_calls_come_and_nothing_is_left_behind(
    calls: Callable[[Player], None], departs: bool, prefetch: int
) -> None:
    record = (Entered(X, (0,)), Left(X), Entered(Y, (1,)), Left(Y), Ready(1), Ready(0), Micro())
    player = Player(facts(prefetch=prefetch), FREE)
    player.runtime.next_window(compile_schedule(record, player.facts))
    player.runtime.replay.backward_began(True)
    calls(player)
    player.deliver(0)
    player.deliver(1)
    assert sorted(finish(player)) == [0, 1]
    assert player.runtime.replay.departures == departs
    if not departs:
        schedule = player.runtime.replay.schedule
        assert schedule is not None
        gathers = [bucket for kind, bucket in schedule.collectives() if kind == "all_gather"]
        assert [bucket for kind, bucket, *_ in player.transport.calls if kind == "all_gather"] == gathers
    runs = [i for i in player.runtime.replay.executed if isinstance(i, Run)]
    if calls is swapped:
        runs.pop(0)  # X was left out, and is recorded where it came after all
    assert tuple(Entered(i.call, i.uses) for i in runs) == tuple(
        event for event in player.runtime.replay.record if isinstance(event, Entered)
    )


def recorded(x: bool, y: bool) -> Record:
    record = Record()
    begin = record.add(Entered(X, (0,)))
    inside = record.add(Entered(Y, (1,)))
    record.suppose(inside, record.add(Left(Y)), y)
    record.suppose(begin, record.add(Left(X)), x)
    record.add(Ready(0))
    return record


def test_calls_are_told_in_the_order_in_which_they_began() -> None:
    assert recorded(True, False).needed() == b"\1\0"


def test_what_no_rank_needed_is_dropped_with_its_end() -> None:
    record = recorded(False, False)
    record.prune(b"\1\0")
    assert tuple(record) == (Entered(X, (0,)), Left(X), Ready(0))
    assert record.needed() == b"", "nothing is supposed any more"
    record = recorded(True, True)
    record.prune(b"\0\1")
    assert tuple(record) == (Entered(Y, (1,)), Left(Y), Ready(0))
