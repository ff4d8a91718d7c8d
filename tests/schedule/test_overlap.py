"""What the passes make of measured costs: communication behind computation, and memory under the budget."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.marks import daily
from tests.support.schedules import random_case, stack
from zeroweave.schedule import (
    BucketFacts,
    Costs,
    Event,
    Facts,
    Line,
    Reduce,
    Schedule,
    Wait,
    build,
    compile_schedule,
    simulate,
    verify,
)
from zeroweave.schedule.instructions import Run, project
from zeroweave.schedule.passes import settle

COMPUTE, GATHER = 1.0, 0.6
SIZE = 100


def costs_of_blocks(record: tuple[Event, ...], blocks: int, gather: float = GATHER, activation: int = 0) -> Costs:
    """Every call takes a second, every gather 0.6, reductions nothing; forwards leave `activation` bytes behind."""
    events = project(record)
    held, activations = 0, []
    for event in events:
        if isinstance(event, Run):
            held += activation if event.call.phase == "forward" else -activation
        activations.append(held)
    return Costs(
        compute=tuple(COMPUTE if isinstance(event, Run) else 0.0 for event in events),
        update={},
        gathers=dict.fromkeys(range(blocks), gather),
        reductions=dict.fromkeys(range(blocks), 0.0),
        gather=Line(0.0, gather / SIZE),
        reduce=Line(),
        activations=tuple(activations),
    )


def blocks_of(blocks: int, micro_steps: int = 1, **settings: object) -> Schedule:
    record = stack(blocks, micro_steps, calls=1)
    buckets = tuple(BucketFacts(i, f"layers.{i}", SIZE, True) for i in range(blocks))
    facts = Facts(
        buckets,
        kept_by_stage=frozenset(),
        depth=2,
        prefetch="auto",
        update_by_bucket=True,
        costs=costs_of_blocks(record, blocks),
    )
    return compile_schedule(record, replace(facts, **settings))  # type: ignore[arg-type]


def gathering(schedule: Schedule) -> float:
    """Seconds of all gathers."""
    assert schedule.costs is not None
    return simulate(schedule, schedule.costs).busy("all_gather")


def exposed(schedule: Schedule) -> float:
    """Seconds in which the compute stream waits for gathers."""
    assert schedule.costs is not None
    waits = simulate(schedule, schedule.costs).waits.items()
    return sum(seconds for index, seconds in waits if isinstance(schedule.instructions[index], Wait))


@pytest.mark.parametrize("blocks", [4, 8, 32])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_auto_hides_all_but_the_first_gather(blocks: int, micro_steps: int) -> None:
    auto, late = blocks_of(blocks, micro_steps), blocks_of(blocks, micro_steps, prefetch=0)
    assert exposed(late) == pytest.approx(gathering(late))
    assert exposed(auto) <= gathering(auto) / blocks
    assert auto.costs is not None
    assert simulate(auto, auto.costs).seconds == pytest.approx(2 * blocks * micro_steps * COMPUTE + GATHER)


def test_auto_gathers_further_ahead_where_one_gather_takes_longer_than_a_call() -> None:
    """Gathers of every other block take 1.6 calls, those between 0.2: one call ahead hides a part only."""
    record = stack(8, 1, calls=1)
    costs = costs_of_blocks(record, 8)
    costs = replace(costs, gathers={block: 1.6 if block % 2 else 0.2 for block in range(8)})
    one, auto = blocks_of(8, prefetch=1, costs=costs), blocks_of(8, costs=costs, memory=10 * SIZE)
    assert exposed(one) > 2.0
    assert exposed(auto) <= gathering(auto) / 8


def test_auto_takes_one_call_where_that_is_as_fast() -> None:
    assert blocks_of(8).instructions == blocks_of(8, prefetch=1).instructions


@pytest.mark.parametrize("memory", [0, SIZE, 2 * SIZE, 3 * SIZE, 5 * SIZE, 8 * SIZE])
@pytest.mark.parametrize("keep", [frozenset(), "auto"], ids=["none", "auto"])
def test_the_peak_stays_under_the_budget(keep: object, memory: int) -> None:
    least = blocks_of(8, prefetch=0)
    schedule = blocks_of(8, memory=memory, keep=keep)
    assert schedule.costs is not None and least.costs is not None
    peak = simulate(schedule, schedule.costs).peak
    assert peak <= max(memory, simulate(least, least.costs).peak)
    if memory >= 3 * SIZE:  # room for one gather ahead, beside a gradient flat
        assert exposed(schedule) <= gathering(schedule) / 8


@daily("seed", range(12), range(12, 120))
def test_no_random_record_goes_over_a_budget_that_the_plain_schedule_keeps(seed: int) -> None:
    rng = random.Random(seed)
    record, facts = random_case(seed)
    ids = range(len(facts.buckets))
    events = len(project(record))
    costs = Costs(
        compute=tuple(rng.random() for _ in range(events)),
        update={},
        gathers={b: 0.2 + rng.random() for b in ids},
        reductions={b: rng.random() for b in ids},
        gather=Line(0.4, 0.1),
        reduce=Line(0.1, 0.1),
        activations=tuple(rng.randrange(30) for _ in range(events)),
    )
    buckets = tuple(replace(bucket, nbytes=rng.randint(1, 8) if bucket.id else 40) for bucket in facts.buckets)
    facts = replace(facts, buckets=buckets, costs=costs)
    least = compile_schedule(record, replace(facts, prefetch=0))
    floor = min(simulate(each, costs).peak for each in (least, settle(build(record, facts))))
    for memory in (floor, floor + 3, floor + 9, floor + 100):
        auto = replace(facts, prefetch="auto", keep="auto", memory=memory)
        schedule = compile_schedule(record, auto)
        prediction = simulate(schedule, costs)
        assert prediction.peak <= memory
        if memory >= simulate(least, costs).peak:
            assert prediction.seconds <= simulate(least, costs).seconds + 1e-9


@pytest.mark.parametrize("room", [3, 4, 5])
def test_keep_fills_the_budget_with_what_need_not_be_gathered_again(room: int) -> None:
    """Gathers take longer than calls."""
    costs = costs_of_blocks(stack(8, 1, calls=1), 8, gather=1.6)
    none = blocks_of(8, costs=costs, memory=room * SIZE)
    some = blocks_of(8, costs=costs, memory=room * SIZE, keep="auto")
    assert simulate(some, costs).seconds < simulate(none, costs).seconds
    assert simulate(some, costs).peak <= room * SIZE
    assert len(some.collectives()) < len(none.collectives())


def test_with_room_for_all_of_it_every_bucket_is_gathered_once() -> None:
    record = stack(6, 3, calls=1)
    costs = costs_of_blocks(record, 6, gather=1.6)
    schedule = blocks_of(6, 3, costs=costs, memory=100 * SIZE, keep="auto")
    assert [b for kind, b in schedule.collectives() if kind == "all_gather"] == list(range(6))
    assert sum(isinstance(i, Reduce) for i in schedule.instructions) == 18


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_a_kept_bucket_is_gathered_once_in_a_window(micro_steps: int) -> None:
    kept = frozenset({1, 3})
    schedule = blocks_of(5, micro_steps, prefetch=1, keep=kept)
    gathers = [b for kind, b in schedule.collectives() if kind == "all_gather"]
    # The others for every forward and backward, but once where one follows the other at once: the last block's
    # backward behind its forward, and the first block's next forward behind its backward.
    assert [gathers.count(bucket) for bucket in range(5)] == [micro_steps + 1, 1, 2 * micro_steps, 1, micro_steps]
    verify(schedule)


def test_auto_keeps_nothing_without_measured_costs() -> None:
    assert blocks_of(4, costs=None, keep="auto").collectives() == blocks_of(4, costs=None).collectives()
