"""When ranks must be ended, rule by rule, with a pretended clock."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest

from zeroweave.ranks.rules import ALIKE_SECONDS, SILENCE, alike, late, waits_in_vain
from zeroweave.ranks.status import Brought, Failure, Member, Status, Wait, steady

DEADLINE = 20.0


def world(ranks: int, **status: Any) -> list[Member]:
    members = [Member(process=f"machine {rank}") for rank in range(ranks)]
    for member in members:
        member.tells(Status(**status), 0.0)
    return members


def failure(**changes: Any) -> Failure:
    return Failure(**({"step": 3, "place": "forward", "count": 5, "error": "ValueError: no"} | changes))


def say(member: Member, now: float, **changes: Any) -> None:
    member.tells(replace(member.status, **changes), now)


# ---------------------------------------------------------------------- failures


def test_a_failure_is_open_until_the_deadline_for_who_may_yet_fail_alike() -> None:
    failing, slow = members = world(2, issued=5)
    assert alike(members, 0.0, DEADLINE) is None
    failing.fails(failure(), 1.0)
    assert alike(members, 1.0 + DEADLINE - 0.1, DEADLINE) is None
    assert alike(members, 1.0 + DEADLINE, DEADLINE) is False
    slow.fails(failure(error="another text"), 1.0 + DEADLINE)
    assert alike(members, 1.0 + DEADLINE, DEADLINE) is True
    for member in members:
        member.survives()
    assert alike(members, 99.0, DEADLINE) is None


@pytest.mark.parametrize(
    "change", [{"step": 4}, {"place": "backward"}, {"count": 6}, {"operations": 1}, {"final": True}]
)
def test_other_failures_are_different_at_once(change: dict[str, Any]) -> None:
    first, second, _ = members = world(3, issued=5)
    first.fails(failure(), 0.0)
    second.fails(failure(**change), 0.0)
    assert alike(members, 0.0, DEADLINE) is False


def test_ranks_that_were_interrupted_do_not_go_on() -> None:
    first, second = members = world(2, issued=5)
    first.fails(failure(interrupted=True), 0.0)
    assert alike(members, 0.0, DEADLINE) is None, "the other one gets the time to fail by itself"
    second.fails(failure(), 0.0)
    assert alike(members, 0.0, DEADLINE) is False


@pytest.mark.parametrize("how", ["collective", "operation", "left", "gone"])
def test_who_has_gone_on_or_left_can_not_fail_alike(how: str) -> None:
    """It has begun a collective, or an agreement, that the failed rank will never come to."""
    failing, other = members = world(2, issued=5)
    failing.fails(failure(), 0.0)
    assert alike(members, 0.1, DEADLINE) is None
    if how == "collective":
        say(other, 0.1, issued=6)
    elif how == "operation":
        other.comes("agreement of step 3")
    elif how == "left":
        say(other, 0.1, left="it closed its engine")
    else:
        other.parts()
    assert alike(members, 0.1, DEADLINE) is False


@pytest.mark.parametrize(
    ("ours", "patience"),
    [
        ({"0": 8, "mine": 3}, ALIKE_SECONDS),
        ({"0": 7, "mine": 3}, DEADLINE),
        ({"0": 5, "mine": 3}, DEADLINE),
        ({"mine": 9}, DEADLINE),
    ],
)
def test_who_waits_in_a_collective_of_the_programs_own_is_ended_sooner(ours: dict[str, int], patience: float) -> None:
    """Which the failed rank has not begun. In groups that it is not in, others may do what they like."""
    failing, waiting = members = world(2, issued=5)
    failing.fails(failure(begun={"0": 7, "theirs": 1}), 0.0)
    say(waiting, 0.0, begun=ours)
    assert alike(members, patience - 0.05, DEADLINE) is None
    assert alike(members, patience, DEADLINE) is False


# ---------------------------------------------------------------------- waiting in vain


def comes(place: str, count: int | None) -> Brought:
    return Brought(place, "gather", b"", DEADLINE, count)


def test_a_rank_in_a_collective_that_another_one_has_done_without() -> None:
    _, second, third = members = world(3, issued=20)
    brought = {0: comes("agreement of step 4", 20)}
    say(second, 0.0, at=4)
    assert waits_in_vain(members, brought) is None, "it may yet reach the agreement"
    say(second, 0.0, issued=21, here="in forward: all ranks must")
    assert waits_in_vain(members, brought) == (
        "rank 0 is at 'agreement of step 4' after 20 collectives; rank 1 has issued 21 and is in step 4, "
        "in forward: all ranks must"
    )
    assert waits_in_vain(members, {0: comes("the options of step 4", None)}) is None, "this comes between collectives"
    brought[1] = comes("agreement of step 4", 21)
    assert waits_in_vain(members, brought) is None, "it has reached the agreement, which compares the counts"
    say(third, 0.0, issued=21)
    assert "; rank 2 has issued 21" in (waits_in_vain(members, brought) or "")


def test_a_rank_that_left_is_missed_only_in_a_collective() -> None:
    first, second, third = members = world(3, issued=20)
    say(first, 0.0, left="it closed its engine")
    assert waits_in_vain(members, {}) is None
    say(third, 0.0, issued=99, left="it closed its engine")
    say(second, 0.0, issued=21)
    assert "rank 0 issues no collective after its 20: it closed its engine" in (waits_in_vain(members, {}) or "")


# ---------------------------------------------------------------------- the deadline


def wait(number: int, seconds: float, where: str = "") -> Wait:
    return Wait(number, seconds, f"collective {number}", where)


def first_word(
    members: list[Member],
    first: float,
    last: float,
    lives: tuple[int, ...],
    since: float,
    stopped: Set[int] = frozenset(),
) -> Any:
    """What is said first, and when; those that live tell at each second that nothing is new, and rank 0 waits."""
    now = first
    while now <= last:
        for rank, member in enumerate(members):
            if rank in lives:
                old = member.status.waits
                say(member, now, waits=old and replace(old, seconds=now - since))
            else:
                member.looked()
        if (found := late(members, now, DEADLINE, stopped)) is not None:
            return now, found
        now += 1.0
    return None


def test_a_rank_that_does_not_come_is_named_after_the_deadline() -> None:
    here, _ = members = world(2, issued=3, call="after step")
    say(here, 5.0, issued=4, waits=wait(4, 0.0, "in forward: do"))
    assert first_word(members, 5.0, 5.0 + DEADLINE, (0, 1), 5.0) is None
    now, found = first_word(members, 5.0 + DEADLINE, 99.0, (0, 1), 5.0)
    assert now <= 5.0 + DEADLINE + 2.0
    assert found == (
        "rank 1 (after step, after 3 collectives) did not come to collective 4 ('collective 4') within the deadline of "
        "20 s; rank 0 waits for it in forward: do"
    )


def test_nobody_waits_for_a_rank_that_computes() -> None:
    assert first_word(world(3, issued=2), 0.0, 10 * DEADLINE, (0, 1), 0.0) is None


def test_what_was_said_before_the_deadline_does_not_count() -> None:
    """It may come just in time, and its word of it be still under way."""
    here, there = members = world(2)
    say(here, 0.0, issued=1, waits=wait(1, 0.0))
    say(there, DEADLINE - 0.1)
    say(here, DEADLINE + 0.5, waits=wait(1, DEADLINE + 0.5))
    assert late(members, DEADLINE + 30.0, DEADLINE) is None
    say(there, DEADLINE + 30.0, issued=1)
    assert late(members, DEADLINE + 31.0, DEADLINE) is None


def test_a_rank_that_comes_nearer_has_time_again() -> None:
    """On a device the host runs ahead: one that is far behind, but goes on, is not missing."""
    here, there = members = world(2)
    say(here, 0.0, issued=8, waits=wait(8, 0.0))
    for index in range(7):
        begin = index * 0.9 * DEADLINE
        say(there, begin, issued=index + 1)
        assert first_word(members, begin, begin + 0.9 * DEADLINE - 1.0, (0, 1), 0.0) is None
    assert "after 7 collectives) did not come to collective 8" in first_word(members, begin, 999.0, (0, 1), 0.0)[1]


def test_who_waits_itself_is_not_blamed() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in an earlier collective."""
    members = world(3)
    for member, count in zip(members, (5, 4, 3), strict=True):
        say(member, 0.0, issued=count, waits=wait(count, 0.0) if count > 3 else None)
    found = first_word(members, 0.0, 2 * DEADLINE, (0, 1, 2), 0.0)[1]
    assert found.startswith("rank 2 (") and "rank 1" not in found


def test_a_silent_rank_that_is_missed_is_late_after_a_while() -> None:
    """Another thread of it may keep Python's lock: it may have come."""
    here, there = members = world(2)
    say(here, 0.0, issued=1, waits=wait(1, 0.0))
    assert first_word(members, 1.0, SILENCE - 1.0, (0,), 0.0) is None
    found = first_word(members, float(SILENCE), 2.0 * SILENCE, (0,), 0.0)
    assert f"after 0 collectives, no sign of life for {SILENCE} s) did not come to collective 1" in found[1]
    say(there, 99.0, issued=1)
    assert late(members, 999.0, DEADLINE) is None, "it has come"


@pytest.mark.parametrize("left", ["", "it closed its engine"])
def test_a_rank_that_nobody_misses_may_be_silent(left: str) -> None:
    here, there = members = world(2, issued=1)
    say(there, 0.0, left=left)
    say(here, 0.0, waits=wait(1, 0.0))
    assert first_word(members, 0.0, 5.0 * SILENCE, (0,), 0.0) is None


@pytest.mark.parametrize("issued", [0, 1])
@pytest.mark.parametrize("how", ["its process is stopped", "its process has gone"])
def test_a_rank_whose_process_is_stopped_or_gone_is_late_at_once(issued: int, how: str) -> None:
    """One that was stopped in the middle of a collective may not go on; of one that has gone nobody knows."""
    here, there = members = world(2)
    say(here, 0.0, issued=1, waits=wait(1, 0.0))
    say(there, 0.0, issued=issued)
    stopped = {1} if how == "its process is stopped" else set()
    if not stopped:
        there.parts()
    found = first_word(members, 0.0, DEADLINE + 3.0, (0,), 0.0, stopped)
    if issued and how == "its process has gone":
        assert found is None
    else:
        assert f"rank 1 (before its first call, after {issued} collectives, {how})" in found[1] and found[0] > DEADLINE


def test_many_ranks_are_not_all_named() -> None:
    members = world(300)
    say(members[0], 0.0, issued=1, waits=wait(1, 0.0))
    found = first_word(members, 0.0, DEADLINE + 3.0, tuple(range(300)), 0.0)[1]
    assert "and rank 8 (" in found and " and 291 more did not come" in found and "rank 9" not in found


def test_what_another_thread_writes_is_read_again() -> None:
    answers = iter([RuntimeError("deque mutated during iteration"), 7])

    def read() -> int:
        if isinstance(answer := next(answers), RuntimeError):
            raise answer
        return answer

    assert steady(read) == 7
