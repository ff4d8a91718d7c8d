"""Budgets that nobody has said: from room and costs alone, the same on all ranks, and only ever smaller."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.schedule.test_overlap import SIZE, blocks_of
from tests.support.marks import daily
from zeroweave.engine.settings import ScheduleSettings
from zeroweave.schedule import Costs, Schedule, budget, compile_schedule, fixed, foreseen, grown, margin, simulate
from zeroweave.schedule.budget import reserve
from zeroweave.schedule.instructions import Reduce, Reshard, Unshard, is_event

BLOCKS, ACTIVATION, REST = 8, 50, 10_000


def measured(room: int) -> tuple[Costs, Schedule]:
    """Costs of a stack of blocks with `REST` bytes beside, and the schedule that they were measured on."""
    schedule = blocks_of(BLOCKS, prefetch=1)
    costs = schedule.facts.costs
    assert costs is not None
    backward = len(costs.activations) // 2
    activations = tuple(ACTIVATION * min(i + 1, 2 * backward - i) for i in range(len(costs.activations)))
    costs = replace(costs, activations=activations, room=room)
    return replace(costs, resident=REST, filled=simulate(schedule, costs).peak), schedule


def follow(costs: Costs, of: Schedule) -> Schedule:
    """What is followed by these costs, with what is free."""
    settings = ScheduleSettings("auto", "auto", "auto", depth=of.facts.depth)
    return settings.schedule(of.record, of.facts, costs, of)


def test_it_is_the_room_less_margin_reserve_and_what_is_beside() -> None:
    costs, of = measured(20_000)
    assert margin(costs) == 1000 and reserve(costs) == max(1000, *costs.activations)
    assert budget(costs, of) == 20_000 - 1000 - reserve(costs) - REST
    assert reserve(replace(costs, activations=(3_000,))) == 3_000, "activations may double"


def test_there_is_none_where_nobody_counts_or_a_bucket_more_has_no_room() -> None:
    costs, of = measured(0)
    assert budget(costs, of) is None
    costs, of = measured(20_000)
    budgets = [budget(replace(costs, room=room), of) for room in range(12_000, 13_500)]
    first = next(index for index, each in enumerate(budgets) if each is not None)
    assert None not in budgets[first:], "more room never means less"
    assert budgets[first] == costs.peak - REST + SIZE


def in_places(schedule: Schedule, buckets: int = BLOCKS) -> Schedule:
    """With so many buckets gathered by copy engines."""
    return replace(
        schedule, facts=replace(schedule.facts, registered=frozenset(sorted(schedule.facts.by_id)[:buckets]))
    )


@daily("registered", [0, BLOCKS - 1], [BLOCKS])
def test_all_is_kept_where_it_has_room(registered: int) -> None:
    kept = set()
    for room in range(12_000, 16_000, 200):
        costs, of = measured(room)
        schedule = follow(costs, in_places(of, registered))
        rest = costs.filled - 2 * SIZE  # two blocks are gathered at once where nothing is kept
        elsewhere = rest + (BLOCKS - registered) * SIZE
        wanted = registered * SIZE + max(elsewhere, costs.filled)
        if wanted <= room - margin(costs) - reserve(costs) - REST - 2 * SIZE:
            assert len(schedule.gathers) == BLOCKS, f"there is room for all in {room}"
        kept.add(len(schedule.gathers))
    assert len(kept) > 3, "more is kept where there is more room"


def odd(rng: random.Random) -> tuple[Costs, Schedule]:
    """Costs of blocks of several sizes, and of activations and reductions that need most at any moment."""
    plain = blocks_of(BLOCKS, rng.choice([1, 1, 2]), prefetch=1)
    sizes = [SIZE * rng.choice([1, 1, 1, 2, 3]) for _ in range(BLOCKS)]
    registered = frozenset(bucket for bucket in range(BLOCKS) if rng.random() < 0.9)
    buckets = tuple(replace(bucket, nbytes=nbytes) for bucket, nbytes in zip(plain.facts.buckets, sizes, strict=True))
    depth = rng.choice([1, 2, 4])
    facts = replace(plain.facts, buckets=buckets, registered=registered, depth=depth)
    costs = facts.costs
    assert costs is not None
    slow, held = rng.choice([0.0, 0.5, 2.0]), rng.choice([0, 1])
    events = [each for each in plain.instructions if is_event(each)]
    costs = replace(
        costs,
        activations=tuple(rng.choice([0, 0, SIZE // 4, SIZE, 4 * SIZE]) for _ in events),
        reductions={bucket: slow * nbytes / SIZE for bucket, nbytes in enumerate(sizes)},
        held=tuple(held * sizes[each.bucket] if isinstance(each, Reduce) else 0 for each in events),
    )
    of = compile_schedule(plain.record, replace(facts, costs=costs))
    filled = simulate(of, costs).peak
    room = int((REST + 5 * SIZE + filled * rng.uniform(1, 3) + sum(sizes) * rng.uniform(0, 2)) / 0.95)
    return replace(costs, filled=filled, resident=REST, room=room), of


def test_the_device_has_room_for_whatever_it_fills() -> None:
    """For places at any time, and for steps that gather in no place."""
    rng = random.Random(5)
    filled = smaller = 0
    for _ in range(100):
        costs, of = odd(rng)
        schedule = follow(costs, of)
        if (memory := schedule.facts.memory) is None:
            assert schedule.facts.keep == frozenset()
            continue
        filled += 1
        smaller += memory != budget(costs, of)
        rest = most_beside_places(schedule, costs)
        stands = schedule.stays - schedule.registered_buffers.keys()
        rest -= sum(schedule.facts.sizes[bucket] for bucket in stands)
        takes = sum(schedule.registered_sizes.values()) + sum(schedule.facts.sizes[b] for b in stands)
        takes += max(rest, costs.filled)
        assert takes + REST + reserve(costs) + margin(costs) <= costs.room
    assert filled > 30 and smaller > 3, (filled, smaller)


def most_beside_places(schedule: Schedule, costs: Costs) -> int:
    """Bytes at most of reductions in flight, activations, and flats that lie in no place."""
    stands = schedule.stays & schedule.registered_buffers.keys()
    registered, most = sum(schedule.facts.sizes[bucket] for bucket in stands), 0
    memory = simulate(schedule, costs).memory
    for index, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Unshard | Reshard) and instruction.bucket in schedule.registered_buffers:
            nbytes = schedule.facts.sizes[instruction.bucket]
            registered += nbytes * (index in schedule.gathers) - nbytes * (index in schedule.drops)
        most = max(most, memory[index] - registered)
    return most


def test_the_rank_with_least_room_and_the_one_that_needs_most_decide() -> None:
    costs, _ = measured(20_000)
    ranks = [costs, replace(costs.higher(70), room=19_000), replace(costs, room=30_000)]
    for order in (ranks, ranks[::-1]):
        assert (Costs.merge(order).room, Costs.merge(order).peak) == (19_000, costs.peak + 70)


def test_what_is_beside_is_that_of_a_rank_and_not_of_two() -> None:
    """Much model state on one rank, large batches on the other: what is foreseen is no less than either takes."""
    costs, of = measured(40_000)
    state, none = 16_000, tuple(0 for _ in costs.activations)
    batch = (8_000, *none[1:])
    ranks = []
    for beside, activations in ((state, none), (1_000, batch)):
        own = replace(costs, activations=activations, resident=beside)
        ranks.append(replace(own, filled=simulate(of, own).peak))
    merged = Costs.merge(ranks)
    assert (merged.resident, fixed(merged)) == (state, state + 8_000)
    memory = budget(merged, of)
    assert memory == 40_000 - 2_000 - 8_000 - state
    schedule = follow(merged, of)
    assert foreseen(merged, schedule) >= max(foreseen(rank, schedule) for rank in ranks)
    assert foreseen(merged, schedule) <= 40_000 - margin(merged) - reserve(merged)


def test_steps_that_grow_shrink_it_by_the_reserve_at_least_until_there_is_none() -> None:
    rng = random.Random(3)
    for _ in range(20):
        costs, of = measured(rng.randrange(12_000, 16_000))
        schedule, steps, before = follow(costs, of), 0, budget(costs, of)
        while before is not None:
            assert foreseen(costs, schedule) + margin(costs) + reserve(costs) <= costs.room
            peak = costs.room - margin(costs) + rng.randrange(1, 300)  # less than the margin is left
            later = grown(costs, schedule, peak, costs.room - rng.randrange(2) * 10)
            assert foreseen(later, schedule) >= peak and later.room <= costs.room
            after = budget(later, of)
            assert after is None or after <= before - reserve(costs)
            costs, before, steps = later, after, steps + 1
            smaller = follow(costs, of)
            assert foreseen(costs, smaller) <= max(costs.room - margin(costs), foreseen(costs, of) + SIZE)
            schedule = smaller
        assert steps <= 20
        assert schedule.facts.keep == frozenset()


def test_a_refusal_without_growth_shrinks_it_by_the_reserve() -> None:
    costs, of = measured(20_000)
    schedule = follow(costs, of)
    later = grown(costs, schedule, peak=0, room=25_000)
    assert later.peak == costs.peak + reserve(costs) and later.room == 20_000
