"""Buckets that no update changes: gathered once, and there from then on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.schedule.test_overlap import SIZE, costs_of_blocks
from tests.support.schedules import stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    Costs,
    Event,
    Facts,
    Instruction,
    Ready,
    Reshard,
    Run,
    Schedule,
    Unshard,
    Wait,
    compile_schedule,
    simulate,
    verify,
)
from zeroweave.schedule.cost import flats_of
from zeroweave.schedule.passes.memory_by_event import price

BLOCKS = 6
FROZEN = frozenset({1, 2, 4})


def record_of(micro_steps: int = 1) -> tuple[Event, ...]:
    events = stack(BLOCKS, micro_steps, calls=1)
    return tuple(event for event in events if not (isinstance(event, Ready) and event.bucket in FROZEN))


def facts_of(stage: int = 3, **more: object) -> Facts:
    plain = stack_facts(BLOCKS, 1)
    buckets = tuple(replace(b, nbytes=SIZE, trainable=b.id not in FROZEN) for b in plain.buckets)
    kept = frozenset(range(BLOCKS)) if stage < 3 else frozenset[int]()
    return replace(plain, buckets=buckets, kept_by_stage=kept, **more)  # type: ignore[arg-type]


def costs_of(record: tuple[Event, ...]) -> Costs:
    return costs_of_blocks(record, BLOCKS, gather=1.6)


def gathered(schedule: Schedule) -> list[int]:
    return [bucket for kind, bucket in schedule.collectives() if kind == "all_gather"]


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_at_stages_1_and_2_only_what_is_updated_is_gathered(micro_steps: int) -> None:
    record = record_of(micro_steps)
    schedule = compile_schedule(record, facts_of(2))
    assert schedule.stays == FROZEN
    assert gathered(schedule) == sorted(set(range(BLOCKS)) - FROZEN)
    assert not {i.bucket for i in schedule.instructions if isinstance(i, Reshard)} & FROZEN
    # in a step in which they are not there yet, they are gathered and waited for where they are needed
    for bucket in FROZEN:
        wait = schedule.instructions.index(Wait(bucket))
        assert schedule.instructions.index(Unshard(bucket)) < wait
        assert wait < next(n for n, i in enumerate(schedule.instructions) if isinstance(i, Run) and bucket in i.uses)
    assert "Unshard layers.1 (stays)" in schedule.text() and "Unshard layers.0 (stays)" not in schedule.text()


def test_what_stays_is_there_from_the_beginning_to_the_end() -> None:
    record = record_of()
    schedule = compile_schedule(record, facts_of(2, costs=costs_of(record)))
    flats = flats_of(schedule)
    assert flats[0] in (len(FROZEN) * SIZE, (len(FROZEN) + 1) * SIZE) and flats[-1] == len(FROZEN) * SIZE
    assert schedule.costs is not None
    prediction = simulate(schedule, schedule.costs)
    waits = [schedule.instructions[index] for index in prediction.waits]
    assert waits and not {i.bucket for i in waits if isinstance(i, Wait)} & FROZEN
    assert len([span for span in prediction.spans if span.lane == "all_gather"]) == BLOCKS - len(FROZEN)
    assert prediction.peak >= BLOCKS * SIZE


def test_ranks_of_which_some_let_go_do_not_agree(tmp_path: Path) -> None:
    schedule = compile_schedule(record_of(), facts_of(2))
    drops = tuple(map(Reshard, sorted(FROZEN)))
    other = replace(schedule, instructions=schedule.instructions + drops)
    verify(other)
    assert other.stays == frozenset() and gathered(other) == list(range(BLOCKS))
    assert other.fingerprint != schedule.fingerprint
    schedule.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json").stays == FROZEN


@pytest.mark.parametrize("keep", [frozenset(), frozenset({0, 1, 4})], ids=["none", "some"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_at_stage_3_those_stay_that_are_to_be_kept(micro_steps: int, keep: frozenset[int]) -> None:
    schedule = compile_schedule(record_of(micro_steps), facts_of(3, keep=keep))
    assert schedule.stays == keep & FROZEN
    counts = {bucket: gathered(schedule).count(bucket) for bucket in range(BLOCKS)}
    assert all(counts[bucket] == (bucket not in FROZEN) for bucket in keep)
    assert all(counts[bucket] == 2 * micro_steps for bucket in range(1, BLOCKS - 1) if bucket not in keep)


@pytest.mark.parametrize("room", [4, 6, 7, 8])
def test_auto_lets_stay_what_has_room(room: int) -> None:
    record = record_of()
    facts = facts_of(3, costs=costs_of(record), prefetch="auto", memory=room * SIZE)
    none, some = compile_schedule(record, facts), compile_schedule(record, replace(facts, keep="auto"))
    assert some.costs is not None
    assert simulate(some, some.costs).peak <= room * SIZE
    assert price(simulate(some, some.costs)) < price(simulate(none, some.costs))
    assert some.stays and some.stays <= FROZEN
    assert len(gathered(some)) < len(gathered(none))
    if room == 8:
        assert some.stays == FROZEN


def test_what_has_no_room_for_all_windows_may_have_it_in_one() -> None:
    record = record_of()
    facts = facts_of(3, costs=costs_of(record), prefetch="auto", memory=3 * SIZE)
    none, some = compile_schedule(record, facts), compile_schedule(record, replace(facts, keep="auto"))
    assert some.stays == frozenset()
    assert [b for b in FROZEN if gathered(some).count(b) < gathered(none).count(b)] == [4]


def changed(schedule: Schedule, *instructions: Instruction, without: Instruction | None = None) -> Schedule:
    rest = [i for i in schedule.instructions if i != without]
    return replace(schedule, instructions=(*rest, *instructions))


def test_what_an_update_changes_does_not_stay() -> None:
    schedule = compile_schedule(record_of(), facts_of(2))
    with pytest.raises(ScheduleError, match=r"layers\.0 is still unsharded"):
        verify(changed(schedule, without=Reshard(0)))


def test_what_stays_has_one_hold_at_the_end() -> None:
    schedule = compile_schedule(record_of(), facts_of(2))
    first = schedule.instructions.index(Unshard(1))
    twice = (*schedule.instructions[:first], Unshard(1), *schedule.instructions[first:])
    with pytest.raises(ScheduleError, match=r"layers\.1 is still unsharded"):
        verify(replace(schedule, instructions=twice))


def test_what_stays_needs_no_buffer() -> None:
    schedule = compile_schedule(record_of(), facts_of(2, registered=frozenset(range(BLOCKS))))
    assert schedule.registered_buffers.keys() == set(range(BLOCKS)) - FROZEN
    verify(schedule)
