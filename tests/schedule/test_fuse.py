"""Launches: which gathers and which reductions share one, and what a schedule with them may not do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.schedule.test_mutations import judge
from tests.schedule.test_properties import replay
from tests.support.schedules import SEEDS, due_together, stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Call,
    Costs,
    End,
    Entered,
    Event,
    Facts,
    Fuse,
    Instruction,
    Left,
    Line,
    Micro,
    Ready,
    Reduce,
    Reshard,
    Run,
    Schedule,
    Settle,
    Unshard,
    Update,
    Wait,
    build,
    compile_schedule,
    simulate,
    verify,
)
from zeroweave.schedule.instructions import project
from zeroweave.schedule.passes import fuse, settle

X = Call("x", "backward")
LINE = Line(1.0, 1 / 64)


def facts(buckets: int, depth: int = 2, nbytes: int = 8, **settings: object) -> Facts:
    made = tuple(BucketFacts(i, "abcdefgh"[i], nbytes, True) for i in range(buckets))
    return Facts(made, frozenset(), depth, 1, False, fuse=True, **settings)  # type: ignore[arg-type]


def costs(record: tuple[Event, ...], *compute: float, line: Line = LINE) -> Costs:
    """Every event computes for a second, or as long as is said."""
    events = len(project(record))
    return Costs(compute or (1.0,) * events, {}, {}, {}, line, line, (0,) * events)


# ---------------------------------------------------------------------- gathers
def equal_blocks(nbytes: int, measured: bool = True, **settings: object) -> Schedule:
    record = stack(8, micro_steps=1, calls=1)
    made = facts(8, nbytes=nbytes, costs=costs(record) if measured else None, **settings)
    return compile_schedule(record, made)


def launches(schedule: Schedule, kind: type) -> list[int]:
    return [len(launch) for launch in schedule.launches if isinstance(launch[0], kind)]


def test_equal_small_buckets_share_launches_as_far_as_the_memory_has_room() -> None:
    plenty, narrow = equal_blocks(8, memory=1000), equal_blocks(8, memory=40)
    assert max(launches(plenty, Unshard)) > max(launches(narrow, Unshard)) == 5
    assert max(launches(equal_blocks(8, memory=24), Unshard)) == 1
    for schedule, most in ((plenty, 1000), (narrow, 40)):
        assert schedule.costs is not None
        plain = replace(schedule.facts, fuse=False)
        fused, before = (
            simulate(each, schedule.costs) for each in (schedule, compile_schedule(schedule.record, plain))
        )
        assert fused.seconds <= before.seconds and fused.busy("all_gather") < before.busy("all_gather")
        assert fused.peak <= most


def test_without_a_budget_equal_buckets_take_one_bucket_more_at_most() -> None:
    fused = equal_blocks(8)
    plain = compile_schedule(fused.record, replace(fused.facts, fuse=False))
    assert fused.costs is not None and any(count > 1 for count in launches(fused, Unshard))
    assert simulate(fused, fused.costs).peak <= simulate(plain, fused.costs).peak + 8


@pytest.mark.parametrize("schedule", [equal_blocks(8, measured=False), equal_blocks(65, memory=10_000)])
def test_equal_buckets_that_nobody_measured_or_that_are_large_do_not(schedule: Schedule) -> None:
    assert not any(isinstance(i, Fuse) for i in schedule.instructions)


# ---------------------------------------------------------------------- reductions
ONE_CALL = (Entered(X, ()), Left(X), Ready(1), Ready(0), Micro())
PLAIN = (Run(X, ()), Reduce(1), Reduce(0), Settle(1), Settle(0), Update(1), Update(0))


def of(record: tuple[Event, ...], *compute: float, depth: int = 2, nbytes: int = 8, line: Line = LINE) -> Schedule:
    buckets = 1 + max(event.bucket for event in record if isinstance(event, Ready))
    return build(record, facts(buckets, depth, nbytes, costs=costs(record, *compute, line=line)))


def test_reductions_that_are_due_together_share_a_launch() -> None:
    before = of(ONE_CALL)
    assert before.instructions == PLAIN
    after = fuse(before)
    assert after.instructions == (Run(X, ()), Fuse(2), *PLAIN[1:])
    assert after.reduced_together == {0: (1, 0), 1: (1, 0)} and before.reduced_together == {}
    assert after.text().splitlines()[1:3] == ["Fuse 2 · Reduce b", "Reduce a"]
    verify(after)


def test_what_is_settled_between_them_is_settled_before() -> None:
    first = (Entered(X, ()), Left(X), Ready(3), Entered(X, ()), Left(X), Ready(2))
    before = of((*first, Entered(X, ()), Left(X), Ready(1), Ready(0), Micro()))
    assert before.instructions[3:9] == (Reduce(2), Run(X, ()), Settle(3), Reduce(1), Settle(2), Reduce(0))
    after = fuse(before)
    assert after.instructions[3:10] == (
        *(Reduce(2), Run(X, ()), Settle(3), Settle(2)),
        *(Fuse(2), Reduce(1), Reduce(0)),
    )
    verify(after)


def test_gathers_between_them_come_behind() -> None:
    before = of(ONE_CALL)
    between = replace(before, instructions=(*PLAIN[:2], Reshard(0), Unshard(1), *PLAIN[2:]))
    assert fuse(between).instructions == (PLAIN[0], Fuse(2), *PLAIN[1:3], Reshard(0), Unshard(1), *PLAIN[3:])


TWO_CALLS = (Entered(X, ()), Left(X), Ready(1), Entered(X, ()), Left(X), Ready(0), Micro())
TWO_BACKWARDS = (Entered(X, ()), Left(X), Ready(1), Micro(), Ready(0), Micro())
UNEQUAL = (*ONE_CALL, Entered(X, ()), Left(X), Ready(0), Ready(1), Micro())


@pytest.mark.parametrize(
    "schedule",
    {
        "a call lies between": of(TWO_CALLS),
        "a backward ends between": of(TWO_BACKWARDS),
        "the other would wait for longer than a start takes": of(ONE_CALL, 1.0, 1.5, 1.0),
        "they are large": of(ONE_CALL, nbytes=40),
        "a start takes no time": of(ONE_CALL, line=Line(0.0, 1.0)),
        "one at a time may be in flight": of(ONE_CALL, depth=1),
        "another backward has another order": of(UNEQUAL),
        "nothing was measured": build(ONE_CALL, facts(2)),
    }.items(),
    ids=lambda item: item[0],
)
def test_reductions_stay_alone_where(schedule: tuple[str, Schedule]) -> None:
    assert fuse(schedule[1]) is schedule[1]


def test_a_launch_has_as_many_reductions_as_may_be_in_flight() -> None:
    record = (Entered(X, ()), Left(X), *map(Ready, range(6)), Micro())
    for depth in (2, 3, 4):
        after = fuse(of(record, depth=depth, nbytes=1))
        verify(after)
        assert max(launches(after, Reduce)) == depth


def test_no_settle_moves_into_a_launch() -> None:
    first = (Entered(X, ()), Left(X), Ready(2))
    schedule = fuse(
        of((*first, Entered(X, ()), Left(X), Ready(1), Ready(0), Micro()), 1.0, 1.0, 0.5, 1.0, 1.0, depth=3)
    )
    moved = settle(schedule)
    verify(moved)
    assert moved.instructions != schedule.instructions
    assert moved.instructions.index(Settle(2)) + 1 == moved.instructions.index(Fuse(2))


def test_what_is_reduced_in_one_launch_is_settled_when_all_of_it_is_over() -> None:
    """It takes 1–2.25, beside calls that begin at 1, 2 and 3."""
    later = (Entered(X, ()), Left(X)) * 3
    launched = fuse(of((Entered(X, ()), Left(X), Ready(1), Ready(0), *later, Micro()), 1.0, 0.0, 0.0, 1.0, 1.0, 1.0))
    runs = [index for index, i in enumerate(settle(launched).instructions) if isinstance(i, Run)]
    assert [type(i) for i in launched.instructions].count(Fuse) == 1
    assert settle(launched).instructions[runs[-1] - 2 : runs[-1]] == (Settle(1), Settle(0))


def test_what_takes_no_time_is_not_settled_before_it_is_reduced() -> None:
    launched = fuse(of(ONE_CALL))
    assert Fuse(2) in launched.instructions
    free = replace(launched, facts=replace(launched.facts, costs=costs(ONE_CALL, line=Line())))
    verify(settle(free))


def test_a_launch_of_reductions_starts_up_once_with_the_last_of_them() -> None:
    """Run 0–1, then b is complete, a half a second later. Alone 1–2.125 and 2.125–3.25, together 1.5–2.75."""
    plain = of(ONE_CALL, 1.0, 0.5, 0.0)
    fused = fuse(plain)
    assert plain.costs is not None
    spans = [
        [(s.start, s.stop) for s in simulate(each, plain.costs).spans if s.lane == "reduce_scatter"]
        for each in (plain, fused)
    ]
    assert spans == [[(1.0, 2.125), (2.125, 3.25)], [(1.5, 2.125), (2.125, 2.75)]]
    assert [simulate(each, plain.costs).seconds for each in (plain, fused)] == [3.25, 2.75]
    assert simulate(fused, plain.costs).peak == 16


ILLEGAL = {
    "one reduction": ((*PLAIN[:1], Fuse(1), *PLAIN[1:]), "Fuse 1: it takes two collectives to be fused"),
    "too few": ((*PLAIN[:2], Fuse(2), *PLAIN[2:]), "Settle b: a Fuse before it asks for 1 more reductions"),
    "a gather among them": (
        (PLAIN[0], Fuse(2), PLAIN[1], Unshard(0), *PLAIN[2:], Wait(0), Reshard(0)),
        "Unshard a: a Fuse before it asks for 1 more reductions",
    ),
    "a reduction among gathers": (
        (PLAIN[0], Fuse(2), Unshard(0), *PLAIN[1:], Wait(0), Reshard(0)),
        "Reduce b: a Fuse before it asks for 1 more gathers",
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_launches(case: str) -> None:
    instructions, reason = ILLEGAL[case]
    with pytest.raises(ScheduleError, match=reason):
        verify(replace(of(ONE_CALL), instructions=instructions))


def test_a_launch_that_is_not_the_same_each_time_is_illegal() -> None:
    schedule = of((*ONE_CALL, *ONE_CALL))
    assert [type(i) for i in fuse(schedule).instructions].count(Fuse) == 2
    once = list(fuse(schedule).instructions)
    once.remove(Fuse(2))
    with pytest.raises(ScheduleError, match="Reduce a: reduced in one launch with others than before"):
        verify(replace(schedule, instructions=tuple(once)))


def test_a_launch_over_the_end_of_a_backward_is_illegal() -> None:
    plain = of(TWO_BACKWARDS)
    at = plain.instructions.index(Reduce(1))
    instructions: tuple[Instruction, ...] = (*plain.instructions[:at], Fuse(2), *plain.instructions[at:])
    with pytest.raises(ScheduleError, match="Reduce a: a Fuse before it asks for reductions of one backward"):
        verify(replace(plain, instructions=instructions))


def test_the_fingerprint_tells_launches_apart(tmp_path: Path) -> None:
    record = (Entered(X, ()), Left(X), *map(Ready, range(3)), Micro())
    plain = of(record, depth=3)
    late, early = (
        replace(plain, instructions=(*plain.instructions[:at], Fuse(2), *plain.instructions[at:])) for at in (1, 2)
    )
    for each in (late, early):
        verify(each)
        each.save(tmp_path / "schedule.json")
        assert Schedule.load(tmp_path / "schedule.json") == each
    assert len({each.fingerprint for each in (plain, late, early)}) == 3


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_random_cases(seed: int) -> None:
    """They replay, event by event; the verifier rejects what is wrong with them, and only that."""
    record, made = due_together(seed)
    schedule = compile_schedule(record, made)
    replay(schedule)
    rest = [i for i in schedule.instructions if isinstance(i, Run | End | Reduce)]
    assert rest == list(project(record))
    judge(schedule, random.Random(seed), rounds=15)


@pytest.mark.matrix
def test_many_random_reductions_share_launches() -> None:
    found = Counter(n for seed in SEEDS for n in launches(compile_schedule(*due_together(seed)), Reduce))
    assert sum(found[n] for n in (2, 3, 4)) >= 40 and found[3] + found[4] >= 5


def test_the_stack_of_equal_blocks_has_no_launches_of_reductions() -> None:
    """Each block's call lies between."""
    record = stack(4, 1, 1)
    schedule = compile_schedule(record, replace(stack_facts(4, 1), fuse=True, costs=costs(record)))
    assert schedule.reduced_together == {}
