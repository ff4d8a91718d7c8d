"""Windows of several kinds: which is which, which comes next, and what is forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.schedules import stack, stack_facts
from zeroweave.schedule import Kind, Kinds, Schedule, compile_schedule
from zeroweave.schedule.kinds import KINDS, expected


def guesses(pattern: Sequence[str]) -> list[bool]:
    """For each window but the first, whether it was expected."""
    return [expected(pattern[:index]) == pattern[index] for index in range(1, len(pattern))]


@pytest.mark.parametrize("period", ["A", "AB", "AAB", "AABB", "ABAC", "AAAAAAAB", "ABCD" * 2 + "E"])
def test_what_repeats_is_expected_from_its_third_time_on(period: str) -> None:
    wrong = [index for index, right in enumerate(guesses(period * 5), 1) if not right]
    assert all(index < 2 * len(period) for index in wrong), wrong


def test_one_that_is_new_is_expected_again() -> None:
    assert expected("AAAB") == "B"
    assert expected("A") == "A"


def test_the_latest_of_equal_matches_decides() -> None:
    assert expected("ABACA") == "C"
    assert expected("ACABA") == "B"


def test_a_single_other_window_is_soon_forgotten() -> None:
    wrong = [index for index, right in enumerate(guesses("A" * 20 + "B" + "A" * 40), 1) if not right]
    assert wrong == [20, 21]


def schedules(count: int) -> list[Schedule]:
    """Of different fingerprints."""
    return [compile_schedule(stack(blocks, 1, 1), stack_facts(blocks, 1)) for blocks in range(2, 2 + count)]


def test_kinds_that_have_not_come_for_long_are_forgotten() -> None:
    made, kinds = schedules(KINDS + 1), Kinds()
    first = [kinds.of(schedule, 1) for schedule in made[:KINDS]]
    assert [kinds.of(schedule, 1) for schedule in made[:KINDS]] == first
    kinds.of(made[KINDS], 1)
    assert kinds.of(made[1], 1) is first[1], "it came after the first one"
    assert kinds.of(made[0], 1) is not first[0]


def test_a_kind_is_known_by_what_it_has_followed_and_by_what_all_compute() -> None:
    plain, better, other = schedules(3)
    kinds = Kinds()
    kind = kinds.of(plain, 1)
    kind.came(plain, 1, followed=False)
    kind.follow(better)
    assert kinds.of(plain, 1) is kinds.of(better, 1) is kind
    assert kinds.of(other, 1) is not kind
    assert kinds.of(plain, 2) is not kind, "what is computed differs, although the same is sent"
    assert kinds.of(plain, 0) is not kind


def test_a_kind_that_was_asked_for_takes_what_its_first_window_computes() -> None:
    plain, better, _ = schedules(3)
    kinds, kind = Kinds(), Kind(better)
    kinds.of(plain, 1)
    kinds.restart(kind)
    assert kinds.of(better, 7) is kind
    kind.came(better, 7, followed=True)
    assert kinds.of(better, 8) is not kind
    assert kinds.of(plain, 1) is not kind and kinds.upcoming.schedule is plain


def test_another_schedule_of_a_kind_is_followed_anew() -> None:
    plain, other, _ = schedules(3)
    kind = Kind(plain)
    for _ in range(3):
        kind.came(plain, 1, followed=True)
    assert kind.followed == 3
    kind.came(other, 1, followed=False)
    assert kind.followed == 0 and kind.schedule is other


def test_ranks_that_are_told_the_same_expect_the_same() -> None:
    rng, made = random.Random(0), schedules(4)
    ranks = [Kinds(), Kinds()]
    for _ in range(200):
        schedule, work = rng.choice(made), rng.choice([0, 1])
        for kinds in ranks:
            kinds.of(schedule, work)
        first, second = (kinds.upcoming for kinds in ranks)
        assert (first.schedule, first.work) == (second.schedule, second.work)
