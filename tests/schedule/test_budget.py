"""Budgets that nobody has said: from room and costs alone, the same on all ranks, and only ever smaller."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.schedule.test_overlap import SIZE, blocks_of
from zeroweave.schedule import Costs, Schedule, budget, compile_schedule, fixed, foreseen, grown, margin, simulate
from zeroweave.schedule.budget import reserve
from zeroweave.schedule.instructions import Reshard, Unshard

BLOCKS, ACTIVATION, REST = 8, 50, 10_000


def measured(room: int) -> tuple[Costs, Schedule]:
    """Costs of a stack of blocks with `REST` bytes beside, and the schedule that they were measured on."""
    schedule = blocks_of(BLOCKS, prefetch=1)
    costs = schedule.facts.costs
    assert costs is not None
    backward = len(costs.activations) // 2
    activations = tuple(ACTIVATION * min(i + 1, 2 * backward - i) for i in range(len(costs.activations)))
    costs = replace(costs, activations=activations, room=room)
    return replace(costs, beside=REST, filled=simulate(schedule, costs).peak), schedule


def follow(costs: Costs, of: Schedule, graphs: bool = False) -> Schedule:
    """What is followed by these costs, with what is free."""
    memory = budget(costs, of, graphs)
    keep = frozenset[int]() if memory is None else "auto"
    facts = replace(of.facts, prefetch="auto", keep=keep, memory=memory, costs=costs)
    return compile_schedule(of.record, facts)


def test_it_is_the_room_less_margin_reserve_and_what_is_beside() -> None:
    costs, of = measured(20_000)
    assert margin(costs) == 1000 and reserve(costs) == max(1000, *costs.activations)
    assert budget(costs, of, graphs=False) == 20_000 - 1000 - reserve(costs) - REST
    assert reserve(replace(costs, activations=(3_000,))) == 3_000, "activations may double"


def test_there_is_none_where_nobody_counts_or_a_bucket_more_has_no_room() -> None:
    costs, of = measured(0)
    assert budget(costs, of, graphs=False) is None
    costs, of = measured(20_000)
    budgets = [budget(replace(costs, room=room), of, graphs=False) for room in range(12_000, 13_500)]
    first = next(index for index, each in enumerate(budgets) if each is not None)
    assert None not in budgets[first:], "more room never means less"
    assert budgets[first] == costs.peak - REST + SIZE


@pytest.mark.parametrize("placed", [BLOCKS, BLOCKS - 1, 0])
def test_graphs_have_all_of_their_own_but_flats_in_places(placed: int) -> None:
    """What stays gathered in places is there once; what is computed is there for graphs and for other steps."""
    for room in (13_000, 20_000):
        costs, of = measured(room)
        of = replace(of, facts=replace(of.facts, placed=frozenset(sorted(of.facts.by_id)[:placed])))
        rest = room - margin(costs) - reserve(costs) - REST
        assert budget(costs, of, graphs=False) == rest, "places are flats, which it counts"
        fills = max(rest - costs.filled - (BLOCKS - placed) * SIZE, rest // 2)
        assert budget(costs, of, graphs=True) == (fills if fills >= costs.filled + SIZE else None)


def test_with_graphs_all_is_kept_where_flats_in_places_and_twice_the_rest_have_room() -> None:
    for room in range(12_000, 16_000, 50):
        costs, of = measured(room)
        of = replace(of, facts=replace(of.facts, placed=frozenset(of.facts.by_id)))
        schedule = follow(costs, of, graphs=True)
        takes = sum(schedule.place_sizes) + 2 * most_beside_places(schedule, costs)
        if budget(costs, of, graphs=True) is not None:
            assert takes + margin(costs) + REST <= room
        if room >= REST + margin(costs) + reserve(costs) + BLOCKS * SIZE + 2 * costs.filled:
            assert len(schedule.gathers) == BLOCKS, f"there is room for all in {room}"


def most_beside_places(schedule: Schedule, costs: Costs) -> int:
    """Bytes of reductions in flight and activations, at most."""
    gathered, most = 0, 0
    for index, (instruction, memory) in enumerate(
        zip(schedule.instructions, simulate(schedule, costs).memory, strict=True)
    ):
        if isinstance(instruction, Unshard) and index in schedule.gathers:
            gathered += SIZE
        elif isinstance(instruction, Reshard) and index in schedule.drops:
            gathered -= SIZE
        most = max(most, memory - gathered)
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
        own = replace(costs, activations=activations, beside=beside)
        ranks.append(replace(own, filled=simulate(of, own).peak))
    merged = Costs.merge(ranks)
    assert (merged.beside, fixed(merged)) == (state, state + 8_000)
    memory = budget(merged, of, graphs=False)
    assert memory == 40_000 - 2_000 - 8_000 - state
    schedule = follow(merged, of)
    assert foreseen(merged, schedule) >= max(foreseen(rank, schedule) for rank in ranks)
    assert foreseen(merged, schedule) <= 40_000 - margin(merged) - reserve(merged)


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_that_grow_shrink_it_by_the_reserve_at_least_until_there_is_none(graphs: bool) -> None:
    rng = random.Random(3)
    for _ in range(20):
        costs, of = measured(rng.randrange(12_000, 16_000))
        schedule, steps, before = follow(costs, of, graphs), 0, budget(costs, of, graphs)
        while before is not None:
            assert foreseen(costs, schedule) + margin(costs) + reserve(costs) <= costs.room
            peak = costs.room - margin(costs) + rng.randrange(1, 300)  # less than the margin is left
            later = grown(costs, schedule, peak, costs.room - rng.randrange(2) * 10)
            assert foreseen(later, schedule) >= peak and later.room <= costs.room
            after = budget(later, of, graphs)
            assert after is None or after <= before - reserve(costs) // (1 + graphs)
            costs, before, steps = later, after, steps + 1
            smaller = follow(costs, of, graphs)
            assert foreseen(costs, smaller) <= max(costs.room - margin(costs), foreseen(costs, of) + SIZE)
            schedule = smaller
        assert steps <= 20
        assert schedule.facts.keep == frozenset()


def test_a_refusal_without_growth_shrinks_it_by_the_reserve() -> None:
    costs, of = measured(20_000)
    schedule = follow(costs, of)
    later = grown(costs, schedule, peak=0, room=25_000)
    assert later.peak == costs.peak + reserve(costs) and later.room == 20_000
