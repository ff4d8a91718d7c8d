"""What the next step needs first: updated first, and gathered anew under the other updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.schedule.headed import BLOCKS, RECORD, ROOM, SIZE, WITHOUT, costs_of, made
from tests.schedule.measured import as_predicted
from tests.support.marks import daily
from tests.support.schedules import stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    PASSES,
    Costs,
    Line,
    Reduce,
    Regather,
    Reshard,
    Run,
    Schedule,
    Settle,
    Step,
    Unshard,
    Update,
    Wait,
    compile_schedule,
    dependencies,
    simulate,
    verify,
)
from zeroweave.schedule import costs_of as costs_of_steps
from zeroweave.schedule.cost import collective_seconds
from zeroweave.schedule.instructions import project
from zeroweave.schedule.passes.heads import early
from zeroweave.schedule.passes.room import price


def tail(schedule: Schedule) -> list[object]:
    last = max(n for n, i in enumerate(schedule.instructions) if isinstance(i, Run | Reduce))
    return list(schedule.instructions[last + 1 :])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("by_bucket", [False, True])
def test_heads_are_updated_as_their_reductions_are_over_and_gathered_anew(stage: int, by_bucket: bool) -> None:
    without, schedule = (made(stage, by_bucket, passes=passes) for passes in (WITHOUT, PASSES))
    assert 0 in schedule.regathers and schedule.stays == set(schedule.regathers)
    behind = tail(schedule)
    for bucket in schedule.regathers:
        assert behind.index(Regather(bucket)) == behind.index(Update(bucket)) + 1
    assert [type(i) for i in behind[-1:]] != [Regather]  # something is updated under it
    assert sorted(i.bucket for i in behind if isinstance(i, Update)) == list(range(BLOCKS))
    settles = [n for n, i in enumerate(behind) if isinstance(i, Settle)]
    updates = [n for n, i in enumerate(behind) if isinstance(i, Update)]
    assert by_bucket or max(settles, default=-1) < min(updates)
    assert not any(isinstance(i, Reshard) and i.bucket in schedule.stays for i in schedule.instructions)
    costs = costs_of()
    assert simulate(schedule, costs).seconds < simulate(without, costs).seconds
    assert schedule.collectives()[-1] == ("all_gather", schedule.regathers[-1])


def test_a_bucket_in_flight_is_waited_for_under_the_updates_of_others() -> None:
    schedule = made(costs=costs_of(reduction=2.5))
    behind = tail(schedule)
    waits = simulate(schedule, costs_of(reduction=2.5)).waits
    before = len(schedule.instructions) - len(behind)
    assert Settle(0) in behind and behind.index(Settle(0)) > 0
    assert before + behind.index(Settle(0)) not in waits
    assert behind[behind.index(Settle(0)) :][:3] == [Settle(0), Update(0), Regather(0)]


@pytest.mark.parametrize(
    "more",
    [{"keep": frozenset()}, {"regather": False}, {"memory": 250}, {"memory": None}, {"costs": costs_of(gather=0.0)}],
    ids=["keep none", "not asked for", "no room", "no budget", "gathers take no time"],
)
def test_where_it_does_not_apply_nothing_changes(more: dict[str, Any]) -> None:
    assert made(**more).instructions == made(passes=WITHOUT, **more).instructions


def peaked(costs: Costs, event: int, nbytes: int) -> Costs:
    """With activations of so many bytes at that event, and none else."""
    return replace(costs, activations=tuple(nbytes * (n == event) for n in range(len(costs.activations))))


def compared(stage: int, costs: Costs, memory: int, **more: Any) -> Schedule:
    """With heads; no dearer than without, and within the memory if that is."""
    without, schedule = (made(stage, passes=passes, memory=memory, costs=costs, **more) for passes in (WITHOUT, PASSES))
    one, other = simulate(schedule, costs), simulate(without, costs)
    assert price(one) <= price(other)
    assert one.peak <= max(memory, other.peak)
    assert len(schedule.places) == 0 and schedule.stays == set(schedule.regathers)
    return schedule


@daily("memory", [300, 800], [500, 1000])
@daily("gather", [0.2, 3.0], [1.0])
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_is_kept_to_and_no_step_is_predicted_to_take_longer(memory: int, gather: float, stage: int) -> None:
    compared(stage, costs_of(gather), memory if stage == 3 else memory + SIZE * BLOCKS)


@daily("fuse", [True], [False])
@daily("prefetch", [0, "auto"], [1, 2])
def test_so_it_is_with_all_that_other_passes_do(prefetch: int | str, fuse: bool) -> None:
    """Activations at one event leave room for less; heads are foreseen with what comes behind them."""
    found = [
        compared(3, peaked(costs_of(gather, 0.3, 0.3), event, nbytes), memory, prefetch=prefetch, fuse=fuse)
        for gather, event, nbytes, memory in ((1.6, 10, 100, 300), (1.6, 24, 100, 600), (2.5, 8, 300, 900))
    ]
    assert any(schedule.regathers for schedule in found) or prefetch != "auto"


@pytest.mark.parametrize("gather", [0.5, 1.0])
def test_reductions_are_expected_as_they_are_with_gathers_ahead(gather: float) -> None:
    """Without, they seem to be over later, and a bucket more is gathered anew that saves nothing."""
    costs = costs_of(gather, reduction=1.6)
    schedule = made(costs=costs)
    assert schedule.regathers == (0,)
    assert simulate(schedule, costs).seconds == pytest.approx(32.8)


def test_heads_come_before_what_fills_the_memory() -> None:
    """With room for one bucket more, that one saves the wait at the beginning of the step."""
    costs = costs_of(gather=0.5)
    plain = simulate(made(costs=costs, passes=WITHOUT, keep=frozenset()), costs).peak
    without, schedule = (made(costs=costs, memory=plain + SIZE, passes=passes) for passes in (WITHOUT, PASSES))
    assert simulate(without, costs).peak == plain + SIZE, "keep fills it"
    assert schedule.regathers == (0,)
    assert price(simulate(schedule, costs)) < price(simulate(without, costs))
    assert simulate(schedule, costs).peak == plain + SIZE


def test_one_that_has_no_room_keeps_no_smaller_one_away() -> None:
    sizes, costs = {0: 100 * SIZE}, costs_of()
    costs = peaked(costs, len(costs.activations) // 4, 300 * SIZE)  # in the first of two micro-steps
    room = 308 * SIZE
    schedule = made(sizes=sizes, costs=costs, memory=room)
    assert schedule.regathers and 0 not in schedule.regathers
    assert simulate(schedule, costs).peak <= room


def test_those_whose_reductions_are_over_are_gathered_as_the_next_step_needs_them() -> None:
    schedule = made(costs=costs_of(reduction=0.01), by_bucket=False)
    used = dict.fromkeys(bucket for event in RECORD for bucket in getattr(event, "uses", ()))
    assert len(schedule.regathers) > 1
    assert schedule.regathers == tuple(bucket for bucket in used if bucket in schedule.regathers)


def test_what_was_waited_for_at_the_start_is_no_computation() -> None:
    """It was gathered in the step before."""
    schedule, late = made(), 0.5
    predicted = as_predicted(schedule).step
    index = schedule.instructions.index(Wait(0))
    moments = [
        replace(moment, start=moment.start + late * (n > index), stop=moment.stop + late * (n >= index))
        for n, moment in enumerate(predicted.moments)
    ]
    collectives = [
        (each.kind, each.bucket, each.issued + late * (each.index > index), each.over + late * (each.index > index))
        for each in predicted.operations
    ]
    step = Step.of(schedule, moments, collectives)
    assert step.waits[index] == late
    assert costs_of_steps([step]).compute == pytest.approx(costs_of_steps([predicted]).compute)
    told = {
        each.bucket: each.exposed for each in step.operations if isinstance(schedule.instructions[each.index], Regather)
    }
    assert told[0] == late and not any(exposed for bucket, exposed in told.items() if bucket)


def test_they_have_places_of_their_own_and_are_sent_by_copy_engine() -> None:
    schedule = made(placed=frozenset(range(BLOCKS)))
    anew = schedule.regathers
    assert anew and schedule.places.keys() == set(range(BLOCKS))
    assert {bucket: place for bucket, place in schedule.places.items() if place < 0} == {each: ~each for each in anew}
    assert schedule.place_sizes[~anew[0]] == SIZE
    assert f"Regather layers.{anew[0]} at its own" in schedule.text() and "Unshard layers.0 (stays)" in schedule.text()
    copies = [index for index in schedule.sends if not isinstance(schedule.instructions[index], Reduce)]
    lane = {(start, stop) for start, stop, reason in dependencies(schedule).edges if reason == "lane"}
    assert set(pairwise(copies)) <= lane and isinstance(schedule.instructions[copies[-1]], Regather)
    assert all(schedule.by_copy_engine("all_gather", bucket) for bucket in range(BLOCKS))


def test_whatever_else_is_gathered_anew_a_bucket_has_the_same_place() -> None:
    """Graphs read it there, and find it whatever comes in turn; and the others take up no more than without it."""
    costs, every = costs_of(reduction=0.01), frozenset(range(BLOCKS))
    for ahead, sizes in ((0, {}), (1, {3: 5 * SIZE}), (2, {0: SIZE // 4, 5: 9 * SIZE})):
        plain = made(costs=costs, passes=WITHOUT, placed=every, prefetch=ahead, sizes=sizes)
        for buckets in ([0, 1], [1, 0], [1], [0, 1, 4]):
            schedule = early(plain, buckets, costs)
            assert {bucket: place for bucket, place in schedule.places.items() if place < 0} == {b: ~b for b in buckets}
            shared = sum(nbytes for place, nbytes in schedule.place_sizes.items() if place >= 0)
            assert shared <= sum(plain.place_sizes.values())


@dataclass(frozen=True)
class Crowded(Schedule):
    """Another bucket lies where one is that is gathered anew."""

    @property
    def places(self) -> dict[int, int]:  # type: ignore[override]
        return {**super().places, 3: super().places[self.regathers[0]]}


def test_nobody_else_ever_lies_in_such_a_place() -> None:
    """Not in front of its first use either, nor behind its last one: it is there from the step before."""
    schedule = early(made(passes=WITHOUT, placed=frozenset(range(BLOCKS))), [0], costs_of())
    verify(schedule)
    with pytest.raises(ScheduleError, match=r"Unshard layers\.3 at -1: layers\.0 lies in place -1"):
        verify(Crowded(schedule.instructions, schedule.record, schedule.facts))


def test_it_comes_back_from_a_file(tmp_path: Path) -> None:
    schedule = made()
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == schedule


def broken(schedule: Schedule) -> list[tuple[str, tuple[object, ...]]]:
    instructions = schedule.instructions
    again = instructions.index(Regather(0))
    return [
        (
            "gathered anew before it is updated",
            (*instructions[: again - 1], Regather(0), Update(0), *instructions[again + 1 :]),
        ),
        ("gathered anew twice", (*instructions[: again + 1], *instructions[again:])),
        ("is still unsharded", (*instructions[:again], *instructions[again + 1 :])),
        ("it does not stay", (*instructions, Reshard(0))),
        ("the step is over", (*instructions[: again + 1], Unshard(0), *instructions[again + 1 :])),
        ("it does not stay", (*instructions, Regather(5))),
    ]


@pytest.mark.parametrize("number", range(6))
def test_what_is_wrong_is_refused(number: int) -> None:
    schedule = made()
    assert 5 not in schedule.stays
    why, instructions = broken(schedule)[number]
    with pytest.raises(ScheduleError, match=why):
        verify(replace(schedule, instructions=instructions))


def test_it_is_illegal_where_nothing_asks_for_it() -> None:
    schedule = made()
    with pytest.raises(ScheduleError, match="nothing asks for"):
        verify(replace(schedule, facts=replace(schedule.facts, regather=False)))


def test_updates_keep_their_order_otherwise() -> None:
    schedule, without = made(), made(passes=WITHOUT)
    order, before = (
        [i.bucket for i in each.instructions if isinstance(i, Update) and i.bucket not in schedule.stays]
        for each in (schedule, without)
    )
    assert order == before and all(a != b for a, b in pairwise(order))


def test_where_copy_engines_gather_they_do_not_wait_for_reductions() -> None:
    costs = costs_of(gather=0.5, reduction=0.9)
    costs = replace(costs, reductions={**costs.reductions, 0: 100.0})
    for placed in (frozenset(range(BLOCKS)), frozenset[int]()):
        schedule = early(made(costs=costs, passes=WITHOUT, placed=placed), [5], costs)
        index, prediction = schedule.instructions.index(Regather(5)), simulate(schedule, costs)
        assert collective_seconds(schedule, index, costs) == 0.5
        (span,) = (span for span in prediction.spans if span.index == index)
        last = max(over for each, over in prediction.over.items() if isinstance(schedule.instructions[each], Reduce))
        assert (span.start < last) == bool(placed)


def test_what_it_takes_is_measured_as_of_other_gathers() -> None:
    costs = costs_of(gather=0.5, reduction=0.9)
    for placed in (frozenset(range(BLOCKS)), frozenset[int]()):
        schedule = made(costs=costs, placed=placed)
        found = costs_of_steps([as_predicted(schedule).step])
        assert schedule.regathers
        assert found.gathers == {bucket: pytest.approx(0.5) for bucket in range(BLOCKS)}


@pytest.mark.parametrize(("stage", "gather", "chosen"), [(2, 0.3, (0,)), (1, 0.3, (0,)), (3, 0.3, ()), (2, 0.0, ())])
def test_a_bucket_that_is_all_there_is_has_the_way_to_the_next_step_beside_it(
    stage: int, gather: float, chosen: tuple[int, ...]
) -> None:
    """Nothing is predicted to be gained or lost. At stage 3 its memory would be."""
    record = stack(1, 4, calls=1)
    events = project(record)
    costs = Costs(
        compute=tuple(0.3 if isinstance(event, Run) else 0.0 for event in events),
        update={0: 0.7},
        gathers={0: gather},
        reductions={0: 0.1},
        gather=Line(0.0, gather / SIZE),
        reduce=Line(0.0, 0.1 / SIZE),
        activations=(0,) * len(events),
    )
    facts = replace(
        stack_facts(1, 1),
        kept_by_stage=frozenset({0} if stage < 3 else ()),
        update_by_bucket=True,
        regather=True,
        keep="auto",
        costs=costs,
        memory=ROOM,
    )
    schedule = compile_schedule(record, facts, PASSES)
    without = compile_schedule(record, facts, WITHOUT)
    assert schedule.regathers == chosen
    assert price(simulate(schedule, costs)) == pytest.approx(price(simulate(without, costs)))
