"""Registered buffers: no two buckets that are gathered at once share one, and the schedule shows each bucket's."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.schedule.measured import as_predicted
from tests.schedule.shuffle import shuffled
from tests.schedule.test_overlap import COMPUTE, GATHER, SIZE, blocks_of, costs_of_blocks
from tests.support.marks import daily
from tests.support.schedules import SEEDS, random_case, stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Costs,
    Facts,
    Reshard,
    Schedule,
    Unshard,
    compile_schedule,
    costs_of,
    dependencies,
    simulate,
    verify,
)
from zeroweave.schedule.passes.memory_by_event import price


def of(blocks: int, registered: frozenset[int], **facts: object) -> Schedule:
    return compile_schedule(stack(blocks, 1, 1), replace(stack_facts(blocks, 1), registered=registered, **facts))  # type: ignore[arg-type]


def sized(schedule: Schedule, *sizes: int) -> Facts:
    buckets = [
        BucketFacts(b.id, b.name, size, b.trainable) for b, size in zip(schedule.facts.buckets, sizes, strict=True)
    ]
    return replace(schedule.facts, buckets=tuple(buckets))


def test_as_many_buffers_as_are_gathered_at_once() -> None:
    all_of_them = frozenset(range(6))
    assert of(6, all_of_them, prefetch=0).registered_buffers == dict.fromkeys(range(6), 0)
    assert of(6, all_of_them, prefetch=1).registered_buffers == {block: block % 2 for block in range(6)}
    kept = of(6, all_of_them, kept_by_stage=all_of_them)
    assert sorted(kept.registered_buffers.values()) == [0, 1, 2, 3, 4, 5]


def test_only_what_is_to_be_registered_is() -> None:
    schedule = of(6, frozenset({1, 4}), prefetch=1)
    assert schedule.registered_buffers == {1: 0, 4: 0}
    assert of(6, frozenset()).registered_buffers == {} and of(6, frozenset()).registered_sizes == {}


def test_the_large_ones_share_what_is_large() -> None:
    plain = of(4, frozenset())
    facts = replace(sized(plain, 900, 10, 10, 900), registered=frozenset(range(4)))
    schedule = compile_schedule(plain.record, facts)
    assert schedule.registered_buffers[0] == schedule.registered_buffers[3] == 0
    assert schedule.registered_sizes == {0: 900, 1: 10, 2: 10}, "two would have done, of 900 each"


def test_it_is_part_of_what_ranks_compare_and_of_what_is_shown(tmp_path: Path) -> None:
    registered, plain = of(3, frozenset({1}), prefetch=0), of(3, frozenset(), prefetch=0)
    assert registered.instructions == plain.instructions and registered.fingerprint != plain.fingerprint
    assert "layers.1 is gathered in registered buffer 0" in registered.words()
    assert "Unshard layers.1 at 0 · Wait layers.1" in registered.text() and " at " not in plain.text()
    registered.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == registered
    assert Schedule.load(tmp_path / "schedule.json").registered_buffers == registered.registered_buffers


def test_unknown_buckets_have_no_buffer() -> None:
    with pytest.raises(ScheduleError, match=r"registered names unknown buckets: \[7\]"):
        replace(stack_facts(2, 1), registered=frozenset({7}))


@dataclass(frozen=True)
class Elsewhere(Schedule):
    """A schedule whose buffers somebody else has assigned."""

    assigned: tuple[tuple[int, int], ...] = ()

    @property
    def registered_buffers(self) -> dict[int, int]:  # type: ignore[override]
        return dict(self.assigned)


def test_the_verifier_looks_for_itself() -> None:
    right = of(2, frozenset({0, 1}), prefetch=1)
    wrong = Elsewhere(right.instructions, right.record, right.facts, ((0, 0), (1, 0)))
    verify(right)
    with pytest.raises(ScheduleError) as error:
        verify(wrong)
    assert str(error.value) == "[ZW701] instruction 1, Unshard layers.1 at 0: layers.0 is in registered buffer 0"


@daily("seed", SEEDS[:20], SEEDS[20:60])
def test_no_two_that_are_gathered_at_once_share_a_buffer(seed: int) -> None:
    record, facts = random_case(seed)
    rng = random.Random(seed)
    registered = frozenset(bucket for bucket in facts.by_id if rng.random() < 0.8)
    schedule = shuffled(compile_schedule(record, replace(facts, registered=registered)), None, rng)
    verify(schedule)
    gathered = {i.bucket for i in schedule.instructions if isinstance(i, Unshard)}
    assert schedule.registered_buffers.keys() == (registered & gathered) - schedule.stays
    holds = dict.fromkeys(facts.by_id, 0)
    for instruction in schedule.instructions:
        if isinstance(instruction, Unshard | Reshard):
            holds[instruction.bucket] += 1 if isinstance(instruction, Unshard) else -1
        lying = [
            schedule.registered_buffers[bucket]
            for bucket, count in holds.items()
            if count and bucket in schedule.registered_buffers
        ]
        assert len(lying) == len(set(lying))


# ---------------------------------------------------------------------- what copy engines cost, which fill buffers
BLOCKS = 6
REDUCE = 0.9
"""Seconds of a reduction: with a gather it takes longer than a call."""


def priced(schedule: Schedule, reduce: float = REDUCE) -> Costs:
    costs = costs_of_blocks(schedule.record, BLOCKS)
    return replace(costs, reductions=dict.fromkeys(range(BLOCKS), reduce), update=dict.fromkeys(range(BLOCKS), 0.0))


def scheduled(registered: bool, **settings: object) -> Schedule:
    plain = blocks_of(BLOCKS)
    buffers = frozenset(range(BLOCKS)) if registered else frozenset()
    facts = replace(plain.facts, registered=buffers, copied=buffers, costs=priced(plain), **settings)  # type: ignore[arg-type]
    return compile_schedule(stack(BLOCKS, 1, calls=1), facts)


def test_gathers_by_copy_engine_do_not_wait_for_reductions() -> None:
    kernels, copies = (scheduled(registered, prefetch=1) for registered in (False, True))
    assert kernels.instructions == copies.instructions
    slow, fast = (simulate(schedule, priced(schedule)) for schedule in (kernels, copies))
    assert fast.seconds < slow.seconds
    assert fast.copied == pytest.approx(fast.busy("all_gather")) and slow.copied == 0.0
    assert price(fast) - fast.seconds < price(slow) - slow.seconds


def test_prefetch_comes_as_late_as_copy_engines_allow() -> None:
    kernels, copies = scheduled(False, memory=10 * SIZE), scheduled(True, memory=10 * SIZE)
    slow, fast = (simulate(schedule, priced(schedule)) for schedule in (kernels, copies))
    assert fast.peak <= slow.peak and fast.seconds <= slow.seconds
    assert sum(fast.waits.values()) <= GATHER + REDUCE + 2 * COMPUTE, "nearly all is hidden"


def test_a_measured_step_knows_how_long_gathers_by_copy_engine_took() -> None:
    schedule = scheduled(True, prefetch=1)
    step = as_predicted(schedule).step
    gathers = [each.seconds for each in step.operations if each.kind == "all_gather"]
    assert gathers == pytest.approx([GATHER] * len(gathers))
    assert not [each.after for each in step.operations if each.kind == "all_gather" and "reduce_scatter" in each.after]
    assert costs_of([step]).gathers == pytest.approx(dict.fromkeys(range(BLOCKS), GATHER))


def test_the_graph_has_a_lane_for_gathers_by_copy_engine() -> None:
    schedule = scheduled(True, prefetch=1)
    gathers = schedule.gathers
    lanes = [(start, stop) for start, stop, reason in dependencies(schedule).edges if reason == "lane"]
    assert lanes and all((start in gathers) == (stop in gathers) for start, stop in lanes)
    mixed = [
        (start, stop) for start, stop, reason in dependencies(scheduled(False, prefetch=1)).edges if reason == "lane"
    ]
    assert any((start in gathers) != (stop in gathers) for start, stop in mixed)
