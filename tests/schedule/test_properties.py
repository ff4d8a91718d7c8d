"""Seeded random records: what is built verifies, replays event by event, and stays within its memory."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.schedules import SEEDS, random_case, stack, stack_facts, stack_with_needs, with_needs
from zeroweave.schedule import (
    Call,
    End,
    Entered,
    Event,
    Instruction,
    Left,
    Needed,
    Offload,
    Phase,
    Ready,
    Reduce,
    Release,
    Reload,
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

EVENTS = (Run, End, Reduce, Update)


class Replay:
    """Executes a schedule as the events of its record come, knowing nothing of those that follow."""

    def __init__(self, schedule: Schedule) -> None:
        self.instructions = schedule.instructions
        self.cursor = 0
        self.holds: Counter[int] = Counter()
        self.arrived: set[int] = set()  # buckets whose values may be read
        self.in_use: Counter[int] = Counter()  # by calls that are really open, whatever the schedule says
        self.in_flight: list[int] = []
        self.ready: list[int] = []  # buckets whose gradients wait for those of others
        self.facts = schedule.facts
        self.open_calls: dict[Call, list[tuple[int, ...]]] = {}
        self.at_run: list[frozenset[int]] = []  # what was resident at each Run
        self.peak = 0
        self.begun: Counter[Call] = Counter()
        self.moved: dict[tuple[Call, int], Instruction] = {}
        self.away = 0  # calls whose activations are gone at present, and at most
        self.most_away = 0

    def next_event(self) -> Instruction | None:
        rest = self.instructions[self.cursor :]
        return next((i for i in rest if isinstance(i, EVENTS)), None)

    def resident(self) -> frozenset[int]:
        return frozenset(+self.holds)

    def event(self, event: Event) -> None:
        match event:
            case Entered(call, uses):
                assert self.next_event() == Run(call, uses)
                self.up_to(Run(call, uses))
                self.open_calls.setdefault(call, []).append(uses)
                self.in_use.update(uses)
                self.at_run.append(self.resident())
            case Needed(call, number):
                assert isinstance(self.moved.get((call, number)), Reload | None)
            case Left(call):
                self.in_use.subtract(self.open_calls[call].pop())
                if self.next_event() == End(call):
                    self.up_to(End(call))
                self.trailing()
            case Ready(bucket):
                assert self.next_event() == Reduce(bucket)
                self.up_to(Reduce(bucket))
                self.trailing()

    def up_to(self, target: Instruction) -> None:
        while self.execute() != target:
            pass

    def trailing(self) -> None:
        while self.cursor < len(self.instructions):
            if not isinstance(self.instructions[self.cursor], Unshard | Reshard | Reload):
                break
            self.execute()

    def execute(self) -> Instruction:
        instruction = self.instructions[self.cursor]
        self.cursor += 1
        match instruction:
            case Unshard(bucket):
                self.holds[bucket] += 1
            case Wait(bucket):
                assert self.holds[bucket] > 0
                self.arrived.add(bucket)
            case Run(call, uses):
                self.begun[call] += 1
                assert self.arrived.issuperset(uses)
            case Reshard(bucket):
                self.holds[bucket] -= 1
                if not self.holds[bucket]:
                    assert not self.in_use[bucket]
                    self.arrived.remove(bucket)
            case Reduce(bucket):
                assert bucket not in self.in_flight
                self.in_flight.append(bucket)
                assert self.facts.load(self.in_flight) <= self.facts.depth
            case Settle(bucket):
                assert self.in_flight.pop(0) == bucket  # in the order of the reductions
            case Update(bucket):
                assert bucket not in self.in_flight
            case Offload(call, number) | Release(call, number) | Reload(call, number):
                before = {Offload: type(None), Release: Offload, Reload: Release}[type(instruction)]
                assert isinstance(self.moved.get((call, number)), before) and number < self.begun[call]
                self.moved[call, number] = instruction
                self.away += isinstance(instruction, Release) - isinstance(instruction, Reload)
                self.most_away = max(self.most_away, self.away)
        self.peak = max(self.peak, len(self.resident()))
        return instruction


def replay(schedule: Schedule) -> Replay:
    executor = Replay(schedule)
    for event in schedule.record:
        executor.event(event)
    rest = schedule.instructions[executor.cursor :]
    assert all(isinstance(i, Wait | Settle | Update | Reshard) for i in rest), "left for the step's end"
    while executor.cursor < len(schedule.instructions):
        executor.execute()
    assert executor.resident() == schedule.stays
    assert not executor.in_flight
    return executor


def allowed_at_runs(record: tuple[Event, ...], prefetch: int) -> list[set[int]]:
    """For each Run: what open calls, this stretch of calls and the next ``prefetch`` stretches use."""
    stretches: list[set[int]] = []
    of_run: list[int] = []
    open_uses: list[set[int]] = []
    open_calls: list[tuple[Call, tuple[int, ...]]] = []
    last: tuple[frozenset[int], Phase] | None = None
    for event in record:
        match event:
            case Entered(call, uses):
                if uses and (frozenset(uses), call.phase) != last:
                    last = (frozenset(uses), call.phase)
                    stretches.append(set(uses))
                open_calls.append((call, uses))
                of_run.append(max(len(stretches) - 1, 0))
                open_uses.append({b for _, u in open_calls for b in u})
            case Left(call):
                position = max(n for n, (c, _) in enumerate(open_calls) if c == call)
                del open_calls[position]
    return [open_uses[n].union(*stretches[stretch : stretch + prefetch + 1]) for n, stretch in enumerate(of_run)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_records(seed: int) -> None:
    record, facts = random_case(seed)
    plain = build(record, facts)
    verify(plain)
    replay(plain)
    schedule = compile_schedule(record, facts)
    executor = replay(schedule)

    allowed = allowed_at_runs(record, facts.prefetch)
    runs = [event for event in record if isinstance(event, Entered)]
    before: frozenset[int] = frozenset()
    for run, resident, bound in zip(runs, executor.at_run, allowed, strict=True):
        assert resident - facts.kept_by_stage <= (bound if run.uses else bound | before)
        before = resident
    gathers = Counter(bucket for kind, bucket in schedule.collectives() if kind == "all_gather")
    assert gathers <= Counter(bucket for kind, bucket in plain.collectives() if kind == "all_gather")
    assert schedule.stays == {bucket for bucket in facts.kept_by_stage if not facts.by_id[bucket].trainable}
    assert all(gathers[bucket] == (bucket not in schedule.stays) for bucket in facts.kept_by_stage)
    reductions = [bucket for kind, bucket in schedule.collectives() if kind == "reduce_scatter"]
    assert reductions == [event.bucket for event in record if isinstance(event, Ready)]


@pytest.mark.parametrize("seed", SEEDS[::2])
def test_random_records_whose_activations_move(seed: int) -> None:
    record, facts = random_case(seed)
    needing = with_needs(record, random.Random(seed))
    schedule = compile_schedule(needing, replace(facts, offload=True))
    assert not replay(schedule).away
    rest = tuple(i for i in schedule.instructions if not isinstance(i, Offload | Release | Reload))
    assert rest == compile_schedule(record, facts).instructions


def test_many_random_activations_do_move() -> None:
    moved = Counter[type]()
    for seed in SEEDS:
        record, facts = random_case(seed)
        schedule = compile_schedule(with_needs(record, random.Random(seed)), replace(facts, offload=True))
        moved.update(map(type, schedule.instructions))
    assert moved[Offload] == moved[Release] == moved[Reload] >= 100


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_activations_of_all_blocks_but_two_are_away_at_once(micro_steps: int) -> None:
    schedule = compile_schedule(stack_with_needs(8, micro_steps), replace(stack_facts(8, 1), offload=True))
    assert replay(schedule).most_away == 6


@pytest.mark.parametrize("prefetch", range(4))
@pytest.mark.parametrize("eager", [False, True])
def test_peak_of_a_stack_of_blocks(prefetch: int, eager: bool) -> None:
    """One bucket a call, no nesting: 1 + prefetch buckets, whether a block is one call or several."""
    record = stack(blocks=8, micro_steps=2, calls=3 if eager else 1)
    executor = replay(compile_schedule(record, stack_facts(8, prefetch)))
    assert executor.peak == 1 + prefetch


def test_a_large_schedule_is_made_quickly() -> None:
    """64 blocks, 8 micro-steps: 5,000 instructions in some 20 ms; the bound catches a quadratic pass."""
    record, facts = stack(blocks=64, micro_steps=8, calls=1), stack_facts(64, prefetch=2)
    began = time.process_time()
    schedule = compile_schedule(record, facts)
    assert schedule.fingerprint
    assert time.process_time() - began < 0.5
    assert len(schedule.instructions) > 3000
