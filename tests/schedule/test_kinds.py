"""Windows of several kinds: which is which, which comes next, and what is forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.schedule.measured import with_costs
from tests.support.schedules import stack, stack_facts, stack_with_needs
from zeroweave.schedule import Schedule, WindowKind, WindowKinds, compile_schedule
from zeroweave.schedule.kinds import KINDS, expected


def guesses(pattern: Sequence[str]) -> list[bool]:
    """For each window but the first, whether it was expected."""
    return [expected(pattern[:index]) == pattern[index] for index in range(1, len(pattern))]


@pytest.mark.parametrize("period", ["A", "AB", "AAB", "AABB", "ABAC", "AAAAAAAB", "ABCD" * 2 + "E", "A" * 24 + "B"])
def test_what_repeats_is_expected_from_its_third_time_on(period: str) -> None:
    wrong = [index for index, right in enumerate(guesses(period * 5), 1) if not right]
    assert all(index < 2 * len(period) for index in wrong), wrong


def test_one_that_is_new_is_expected_again() -> None:
    assert expected("AAAB") == "B"
    assert expected("A") == "A"


def test_the_latest_of_equal_matches_decides() -> None:
    assert expected("ABACA") == "C"
    assert expected("ACABA") == "B"


def test_a_single_other_window_is_expected_again_only_where_a_pattern_would_have_it() -> None:
    wrong = [index for index, right in enumerate(guesses("A" * 20 + "B" + "A" * 100), 1) if not right]
    assert wrong == [20, 21, 40, 41]


def schedules(count: int) -> list[Schedule]:
    """Of different fingerprints."""
    return [compile_schedule(stack(blocks, 1, 1), stack_facts(blocks, 1)) for blocks in range(2, 2 + count)]


def test_kinds_that_have_not_come_for_long_are_forgotten() -> None:
    made, kinds = schedules(KINDS + 1), WindowKinds()
    first = [kinds.of(schedule, 1) for schedule in made[:KINDS]]
    assert [kinds.of(schedule, 1) for schedule in made[:KINDS]] == first
    kinds.of(made[KINDS], 1)
    assert kinds.of(made[1], 1) is first[1], "it came after the first one"
    assert kinds.of(made[0], 1) is not first[0]


def test_a_kind_is_known_by_what_it_has_followed_and_by_what_all_compute() -> None:
    plain, better, other = schedules(3)
    kinds = WindowKinds()
    kind = kinds.of(plain, 1)
    kind.came(plain, 1, followed=False)
    kind.follow(better)
    assert kinds.of(plain, 1) is kinds.of(better, 1) is kind
    assert kinds.of(other, 1) is not kind
    assert kinds.of(plain, 2) is not kind, "what is computed differs, although the same is sent"
    assert kinds.of(plain, 0) is not kind


def test_a_kind_that_was_asked_for_takes_what_its_first_window_computes() -> None:
    plain, better, _ = schedules(3)
    kinds, kind = WindowKinds(), WindowKind(better)
    kinds.of(plain, 1)
    kinds.restart(kind)
    assert kinds.of(better, 7) is kind
    kind.came(better, 7, followed=True)
    assert kinds.of(better, 8) is not kind
    assert kinds.of(plain, 1) is not kind and kinds.upcoming.schedule is plain


def test_work_that_ranks_do_not_share_takes_no_kind_that_was_asked_for() -> None:
    plain, _, _ = schedules(3)
    kinds, kind = WindowKinds(), WindowKind(plain)
    kinds.restart(kind)
    assert kinds.of(plain, 0) is not kind
    assert kinds.of(plain, 7) is kind


def test_costs_are_those_of_the_same_work_whatever_backwards_need() -> None:
    costs = with_costs(schedules(1)[0]).facts.costs
    assert costs is not None
    facts, needs = stack_facts(2, 1), [stack_with_needs(2, 1, nbytes) for nbytes in (8, 16)]
    one, two = (compile_schedule(record, facts) for record in needs)
    kinds = WindowKinds()
    kind = kinds.of(one, 1)
    kind.came(one, 1, followed=False)
    kind.measure(costs)
    assert kinds.measured_on(two.record) is kind and one.shape == two.shape
    assert kinds.measured_on(stack(2, 2, 1)) is None
    kind.came(two, 1, followed=True)
    assert kind.costs is costs
    other = schedules(2)[1]
    kind.came(other, 1, followed=True)
    assert (kind.costs, kind.measured) == (None, None), "measured on other work"


def test_an_equal_schedule_leaves_what_was_timed_of_the_first() -> None:
    (one,), (two,) = schedules(1), schedules(1)
    kind = WindowKind(one)
    kind.came(two, 1, followed=False)
    assert one is not two and kind.schedule is one


def test_another_schedule_of_a_kind_is_followed_anew() -> None:
    plain, other, _ = schedules(3)
    kind = WindowKind(plain)
    for _ in range(3):
        kind.came(plain, 1, followed=True)
    assert kind.followed == 3
    kind.came(other, 1, followed=False)
    assert kind.followed == 0 and kind.schedule is other


def test_ranks_that_are_told_the_same_expect_the_same() -> None:
    rng, made = random.Random(0), schedules(4)
    ranks = [WindowKinds(), WindowKinds()]
    for _ in range(200):
        schedule, work = rng.choice(made), rng.choice([0, 1])
        for kinds in ranks:
            kinds.of(schedule, work)
        first, second = (kinds.upcoming for kinds in ranks)
        assert (first.schedule, first.work) == (second.schedule, second.work)
