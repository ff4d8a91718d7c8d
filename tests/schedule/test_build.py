"""Golden schedules of a four-block model, and what ``build`` decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from textwrap import dedent

import pytest

from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Call,
    Entered,
    Event,
    Facts,
    Left,
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
    verify,
)

NAMES = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")


def make_facts(
    names: Iterable[str] = NAMES,
    *,
    keep: Iterable[int] = (),
    frozen: Iterable[int] = (),
    depth: int = 2,
    prefetch: int = 1,
    update_by_bucket: bool = False,
) -> Facts:
    buckets = tuple(BucketFacts(i, name, 1024, i not in set(frozen)) for i, name in enumerate(names))
    return Facts(buckets, frozenset(keep), depth, prefetch, update_by_bucket)


def whole(name: str, phase: str, *uses: int) -> list[Event]:
    call = Call(name, "forward" if phase == "forward" else "backward")
    return [Entered(call, uses), Left(call)]


def micro_step(reduce: bool = True) -> list[Event]:
    """Forward and backward of templates; the embedding's backward needs no value."""
    events: list[Event] = []
    for bucket, name in enumerate(NAMES):
        events += whole(name, "forward", bucket)
    for bucket, name in reversed(list(enumerate(NAMES))):
        events += whole(name, "backward", *([bucket] if bucket else []))
        events += [Ready(bucket)] if reduce else []
    return [*events, Micro()]


def golden(text: str) -> str:
    return dedent(text).strip()


def test_stage_3() -> None:
    schedule = compile_schedule(tuple(micro_step()), make_facts())
    assert schedule.text() == golden("""
        Unshard embed · Unshard layers.0 · Wait embed · Run embed forward [embed]
        Reshard embed · Unshard layers.1 · Wait layers.0 · Run layers.0 forward [layers.0]
        Reshard layers.0 · Unshard layers.2 · Wait layers.1 · Run layers.1 forward [layers.1]
        Reshard layers.1 · Unshard layers.3 · Wait layers.2 · Run layers.2 forward [layers.2]
        Reshard layers.2 · Unshard head · Wait layers.3 · Run layers.3 forward [layers.3]
        Reshard layers.3 · Wait head · Run head forward [head]
        Unshard layers.3 · Run head backward [head]
        Reshard head · Reduce head
        Unshard layers.2 · Wait layers.3 · Run layers.3 backward [layers.3]
        Reshard layers.3 · Reduce layers.3
        Unshard layers.1 · Wait layers.2 · Run layers.2 backward [layers.2]
        Reshard layers.2 · Settle head · Reduce layers.2
        Unshard layers.0 · Wait layers.1 · Run layers.1 backward [layers.1]
        Reshard layers.1 · Settle layers.3 · Reduce layers.1
        Wait layers.0 · Run layers.0 backward [layers.0]
        Reshard layers.0 · Settle layers.2 · Reduce layers.0
        Run embed backward
        Settle layers.1 · Reduce embed
        Settle layers.0 · Settle embed · Update head
        Update layers.3
        Update layers.2
        Update layers.1
        Update layers.0
        Update embed
    """)
    # Once where the backward needs no value (embed) or follows the forward at once (head), else twice.
    gathers = [bucket for kind, bucket in schedule.collectives() if kind == "all_gather"]
    assert gathers == [0, 1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert schedule.reduce_order == (5, 4, 3, 2, 1, 0)


def test_stage_2_reduces_in_each_backward() -> None:
    schedule = compile_schedule(tuple(micro_step() * 2), make_facts(keep=range(6), update_by_bucket=True))
    assert schedule.text() == golden("""
        Unshard embed · Unshard layers.0 · Wait embed · Run embed forward [embed]
        Unshard layers.1 · Wait layers.0 · Run layers.0 forward [layers.0]
        Unshard layers.2 · Wait layers.1 · Run layers.1 forward [layers.1]
        Unshard layers.3 · Wait layers.2 · Run layers.2 forward [layers.2]
        Unshard head · Wait layers.3 · Run layers.3 forward [layers.3]
        Wait head · Run head forward [head]
        Run head backward [head]
        Reduce head
        Run layers.3 backward [layers.3]
        Reduce layers.3
        Run layers.2 backward [layers.2]
        Settle head · Reduce layers.2
        Run layers.1 backward [layers.1]
        Settle layers.3 · Reduce layers.1
        Run layers.0 backward [layers.0]
        Settle layers.2 · Reduce layers.0
        Run embed backward
        Settle layers.1 · Reduce embed
        Run embed forward [embed]
        Run layers.0 forward [layers.0]
        Run layers.1 forward [layers.1]
        Run layers.2 forward [layers.2]
        Run layers.3 forward [layers.3]
        Run head forward [head]
        Run head backward [head]
        Settle layers.0 · Reduce head
        Run layers.3 backward [layers.3]
        Settle embed · Reduce layers.3
        Run layers.2 backward [layers.2]
        Settle head · Reduce layers.2
        Run layers.1 backward [layers.1]
        Settle layers.3 · Reduce layers.1
        Run layers.0 backward [layers.0]
        Settle layers.2 · Reduce layers.0
        Run embed backward
        Settle layers.1 · Reduce embed
        Update head
        Update layers.3
        Update layers.2
        Update layers.1
        Settle layers.0 · Update layers.0
        Settle embed · Update embed
        Reshard embed · Reshard layers.0 · Reshard layers.1 · Reshard layers.2 · Reshard layers.3 · Reshard head
    """)
    assert [kind for kind, _ in schedule.collectives()].count("all_gather") == 6


def test_stage_1_reduces_at_the_boundary() -> None:
    schedule = compile_schedule(tuple(micro_step(False) + micro_step()), make_facts(keep=range(6)))
    assert schedule.text() == golden("""
        Unshard embed · Unshard layers.0 · Wait embed · Run embed forward [embed]
        Unshard layers.1 · Wait layers.0 · Run layers.0 forward [layers.0]
        Unshard layers.2 · Wait layers.1 · Run layers.1 forward [layers.1]
        Unshard layers.3 · Wait layers.2 · Run layers.2 forward [layers.2]
        Unshard head · Wait layers.3 · Run layers.3 forward [layers.3]
        Wait head · Run head forward [head]
        Run head backward [head]
        Run layers.3 backward [layers.3]
        Run layers.2 backward [layers.2]
        Run layers.1 backward [layers.1]
        Run layers.0 backward [layers.0]
        Run embed backward
        Run embed forward [embed]
        Run layers.0 forward [layers.0]
        Run layers.1 forward [layers.1]
        Run layers.2 forward [layers.2]
        Run layers.3 forward [layers.3]
        Run head forward [head]
        Run head backward [head]
        Reduce head
        Run layers.3 backward [layers.3]
        Reduce layers.3
        Run layers.2 backward [layers.2]
        Settle head · Reduce layers.2
        Run layers.1 backward [layers.1]
        Settle layers.3 · Reduce layers.1
        Run layers.0 backward [layers.0]
        Settle layers.2 · Reduce layers.0
        Run embed backward
        Settle layers.1 · Reduce embed
        Settle layers.0 · Settle embed · Update head
        Update layers.3
        Update layers.2
        Update layers.1
        Update layers.0
        Update embed
        Reshard embed · Reshard layers.0 · Reshard layers.1 · Reshard layers.2 · Reshard layers.3 · Reshard head
    """)


def test_eager_calls_nest_in_a_root_that_has_parameters() -> None:
    """Gradients become ready inside their calls; the root's bucket is used by a call inside it as well."""
    names = ("root", "a", "b")
    root_forward, root_backward = Call("root", "forward"), Call("root", "backward")
    a, b = Call("a", "backward"), Call("b", "backward")
    record: tuple[Event, ...] = (
        Entered(root_forward, (0,)),
        *whole("a", "forward", 1),
        *whole("b", "forward", 2, 0),
        Left(root_forward),
        Entered(root_backward, (0,)),
        *(Entered(b, (2, 0)), Ready(2), Left(b)),
        *(Entered(a, (1,)), Ready(1), Left(a)),
        Ready(0),
        Left(root_backward),
        Micro(),
    )
    assert compile_schedule(record, make_facts(names)).text() == golden("""
        Unshard root · Unshard a · Wait root · Run root forward [root]
        Unshard b · Wait a · Run a forward [a]
        Reshard a · Unshard root · Wait b · Wait root · Run b forward [b, root]
        End root forward
        Run root backward [root]
        Unshard a · Run b backward [b, root]
        Reduce b
        End b backward
        Reshard b · Reshard root · Wait a · Run a backward [a]
        Reduce a
        End a backward
        Reshard a · Settle b · Reduce root
        End root backward
        Reshard root · Settle a · Settle root · Update b
        Update a
        Update root
    """)


def test_build_without_passes() -> None:
    record = (*whole("f", "forward", 0, 1), *whole("f", "backward", 0), Ready(1), Micro())
    forward, backward = Run(Call("f", "forward"), (0, 1)), Run(Call("f", "backward"), (0,))
    assert build(record, make_facts("ab", frozen=[0])).instructions == (
        *(Unshard(0), Unshard(1), Wait(0), Wait(1), forward, Reshard(0), Reshard(1)),
        *(Unshard(0), Wait(0), backward, Reshard(0), Reduce(1)),
        *(Settle(1), Update(1)),
    )


def test_kept_buckets_without_a_use_are_gathered_before_the_backward() -> None:
    record = (*whole("f", "forward", 1), *whole("f", "backward", 1), Ready(2), Ready(1), Ready(0), Micro())
    instructions = build(record, make_facts("abc", keep=[0, 1, 2])).instructions
    assert instructions[:8] == (
        *(Unshard(1), Wait(1), Run(Call("f", "forward"), (1,))),
        *(Unshard(0), Unshard(2), Wait(0), Wait(2), Run(Call("f", "backward"), (1,))),
    )
    assert instructions[-3:] == (Reshard(1), Reshard(0), Reshard(2))


def test_a_bucket_reduced_again_is_settled_first() -> None:
    """The second reduction of a bucket adds to the first one's result, so that must be there."""
    record = (*whole("f", "forward", 0), Ready(0), Ready(1), Ready(0), Micro())
    assert (
        build(record, make_facts("ab", depth=3)).instructions[-7:]
        == (
            *(Reduce(0), Reduce(1), Settle(0), Reduce(0)),
            *(Settle(1), Settle(0), Update(1)),
            Update(0),
        )[-7:]
    )


def test_depth_one_settles_before_each_reduction() -> None:
    record = (*whole("f", "forward", 0), Ready(0), Ready(1), Micro())
    tail = build(record, make_facts("ab", depth=1, update_by_bucket=True)).instructions[-6:]
    assert tail == (Reduce(0), Settle(0), Reduce(1), Update(0), Settle(1), Update(1))


def test_equal_calls_open_at_once_both_get_an_end() -> None:
    call = Call("f", "backward")
    record = (Entered(call, (0,)), Entered(call, (0,)), Left(call), Left(call), Ready(0), Micro())
    assert compile_schedule(record, make_facts("a")).text() == golden("""
        Unshard a · Wait a · Run f backward [a]
        Unshard a · Wait a · Run f backward [a]
        End f backward
        Reshard a · End f backward
        Reshard a · Reduce a
        Settle a · Update a
    """)


def test_one_layer_called_three_times_is_gathered_once_each_way() -> None:
    record = (
        *(whole("f", "forward", 0) * 3 + whole("g", "forward", 1)),
        *(whole("g", "backward", 1) + [Ready(1)] + whole("f", "backward", 0) * 3 + [Ready(0), Micro()]),
    )
    schedule = compile_schedule(record, make_facts("ab"))
    gathers = [bucket for kind, bucket in schedule.collectives() if kind == "all_gather"]
    assert gathers == [0, 1, 0]


def test_of_shows_the_lines_that_touch_a_block() -> None:
    names = ("layers.1", "layers.1.frozen", "layers.10", "head")
    record = (
        *(whole("layers.1", "forward", 0, 1) + whole("layers.10", "forward", 2) + whole("head", "forward", 3)),
        *(Ready(3), Ready(2), Ready(0), Micro()),
    )
    schedule = compile_schedule(record, make_facts(names, frozen=[1]))
    assert "\n".join(schedule.of("layers.1")) == golden("""
        Unshard layers.1 · Unshard layers.1.frozen · Unshard layers.10 · Wait layers.1 · Wait layers.1.frozen · Run layers.1 forward [layers.1, layers.1.frozen]
        Reshard layers.1 · Reshard layers.1.frozen · Unshard head · Wait layers.10 · Run layers.10 forward [layers.10]
        Settle head · Reduce layers.1
        Settle layers.10 · Settle layers.1 · Update head
        Update layers.1
    """)  # noqa: E501
    assert schedule.of("layers") == tuple(line for line in schedule.text().splitlines() if "layers" in line)
    assert schedule.of("nothing") == ()


def test_fingerprint() -> None:
    record = tuple(micro_step())
    stage_3 = compile_schedule(record, make_facts())
    assert 0 < stage_3.fingerprint < 2**64
    # A fixed number: it must not depend on the process, as hash() of a string does.
    assert stage_3.fingerprint == compile_schedule(record, make_facts()).fingerprint == 17867089547615016361
    others = {
        compile_schedule(tuple(micro_step() * 2), make_facts()).fingerprint,
        compile_schedule(record, make_facts(keep=range(6))).fingerprint,
        compile_schedule(record, make_facts(depth=1)).fingerprint,
        compile_schedule(record, make_facts(prefetch=2)).fingerprint,
        compile_schedule(record, make_facts((*NAMES[:5], "tail"))).fingerprint,
    }
    assert len(others | {stage_3.fingerprint}) == 6


def test_reduce_order_is_the_last_backwards() -> None:
    record = (*whole("f", "forward", 0), Ready(0), Ready(1), Micro(), Ready(1), Ready(0), Ready(1), Micro())
    assert build(record, make_facts("ab")).reduce_order == (1, 0)
    assert build(record[:-1], make_facts("ab")).reduce_order == (1, 0)
    assert build((), make_facts("ab")).reduce_order == ()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((Left(Call("f", "forward")),), "event 0: .*not entered"),
        ((Entered(Call("f", "forward"), ()),), "never left"),
        (tuple(whole("f", "forward", 7)), r"event 0: .*unknown buckets \[7\]"),
        ((Ready(7),), "unknown bucket 7"),
        ((Ready(1),), "event 0: gradients of b, not a trainable bucket"),
    ],
)
def test_impossible_records_are_refused(record: tuple[Event, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(record, make_facts("ab", frozen=[1]))


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"prefetch": -1}, {"keep": [9]}])
def test_impossible_facts_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ScheduleError):
        make_facts("ab", **wrong)  # type: ignore[arg-type]


def test_bucket_ids_are_unique() -> None:
    with pytest.raises(ScheduleError, match="same id"):
        Facts((BucketFacts(0, "a", 1, True),) * 2, frozenset(), 1, 0, False)


def test_a_gather_starts_with_the_first_hold_and_the_storage_goes_with_the_last() -> None:
    twice = (Unshard(0), Unshard(1), Unshard(0), Reshard(0), Reshard(1), Reshard(0), Unshard(0), Reshard(0))
    schedule = Schedule(twice, (), make_facts())
    assert schedule.gathers == {0, 1, 6}
    assert schedule.drops == {4, 5, 7}
    assert schedule.collectives() == (("all_gather", 0), ("all_gather", 1), ("all_gather", 0))


# ---------------------------------------------------------------------- many slight buckets count as one in flight
def test_a_slight_bucket_does_not_count_among_the_reductions_in_flight() -> None:
    buckets = (
        BucketFacts(0, "block", 4096, True),
        BucketFacts(1, "norm", 15, True),
        BucketFacts(2, "head", 4096, True),
    )
    facts = Facts(buckets, frozenset(), 2, 1, False)
    assert facts.slight == {1}
    record = [*whole("all", "forward"), *whole("all", "backward"), Ready(2), Ready(1), Ready(0), Micro()]
    reduces = [Reduce(2), Reduce(1), Reduce(0)]
    assert [i for i in build(tuple(record), facts).instructions if isinstance(i, Reduce | Settle)] == [
        *reduces, Settle(2), Settle(1), Settle(0)
    ]  # fmt: skip
    again = build((*record[:-1], Ready(2), Micro()), facts)
    assert [i for i in again.instructions if isinstance(i, Reduce | Settle)] == [
        *reduces, Settle(2), Reduce(2), Settle(1), Settle(0), Settle(2)
    ]  # fmt: skip
    compile_schedule(tuple(record), facts)
    counts = replace(facts, buckets=(buckets[0], BucketFacts(1, "norm", 16, True), buckets[2]))
    assert not counts.slight
    assert not replace(facts, buckets=(*buckets[1:2], replace(buckets[0], trainable=False))).slight
    with pytest.raises(ScheduleError, match="more than 2 reductions in flight"):
        verify(Schedule(build(tuple(record), facts).instructions, tuple(record), counts))


def test_many_slight_buckets_count_as_one() -> None:
    buckets = (BucketFacts(0, "table", 2560, True), *(BucketFacts(1 + i, f"norm{i}", 9, True) for i in range(600)))
    facts = Facts(buckets, frozenset(), 1, 1, False)
    record = [*whole("all", "forward"), *whole("all", "backward"), *map(Ready, range(1, 601)), Ready(0), Micro()]
    in_flight: list[int] = []
    most = 0
    for each in build(tuple(record), facts).instructions:
        if isinstance(each, Reduce):
            in_flight.append(each.bucket)
        elif isinstance(each, Settle):
            assert in_flight.pop(0) == each.bucket
        most = max(most, 9 * len(in_flight))
    assert 2560 < most < 2 * 2560  # as many bytes as depth 2 would give the largest
    assert facts.load(range(1, 285)) == 0 and facts.load(range(1, 286)) == 1 and facts.load(range(286)) == 2
