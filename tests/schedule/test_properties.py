"""Seeded random records: what is built verifies, replays event by event, and stays within its memory.

``Replay`` is the executor's contract in a few lines. ``is_legal`` says what a legal schedule is once more, in
another way than the verifier, and judges mutated schedules.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    BucketFacts,
    Call,
    End,
    Entered,
    Event,
    Facts,
    Instruction,
    Left,
    Micro,
    Phase,
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

SEEDS = range(150)


# random records


def random_calls(rng: random.Random, phase: Phase, buckets: int) -> list[Event]:
    """Calls that nest and, in backward, overlap; names recur, also while a call of that name is open."""
    events: list[Event] = []
    open_calls: list[tuple[Call, tuple[int, ...]]] = []
    for _ in range(rng.randint(1, 12)):
        name = rng.randrange(buckets + 2)
        uses = tuple(rng.sample(range(buckets), rng.choice([0, 1, 1, 1, 2, min(3, buckets)])))
        # Equal calls that are open at once use the same buckets: they are calls of one module.
        uses = next((u for c, u in open_calls if c.name == f"m{name}"), uses)
        open_calls.append((Call(f"m{name}", phase), uses))
        events.append(Entered(*open_calls[-1]))
        while open_calls and rng.random() < 0.6:
            position = rng.randrange(len(open_calls)) if phase == "backward" else -1
            events.append(Left(open_calls.pop(position)[0]))
    return events + [Left(call) for call, _ in reversed(open_calls)]


def random_case(seed: int) -> tuple[tuple[Event, ...], Facts]:
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    buckets = tuple(BucketFacts(i, f"b{i}", 1, rng.random() < 0.8) for i in range(count))
    trainable = [b.id for b in buckets if b.trainable]
    keep = rng.choice([frozenset(), frozenset(range(count)), frozenset(rng.sample(range(count), count // 2))])
    record: list[Event] = []
    micro_steps = rng.choice([1, 1, 2, 3])
    at_boundary = rng.random() < 0.3
    for micro_step in range(micro_steps):
        record += random_calls(rng, "forward", count)
        backward = random_calls(rng, "backward", count)
        if not at_boundary or micro_step == micro_steps - 1:
            # A bucket may become ready once more, when a contribution comes late.
            for bucket in trainable + rng.sample(trainable, min(len(trainable), rng.choice([0, 0, 1]))):
                backward.insert(rng.randint(0, len(backward)), Ready(bucket))
        record += [*backward, Micro()]
    facts = Facts(buckets, keep, rng.randint(1, 4), rng.randint(0, 3), rng.random() < 0.5)
    return tuple(record), facts


# the executor


class Replay:
    """Executes a schedule as the events of its record come, knowing nothing of those that follow."""

    def __init__(self, schedule: Schedule) -> None:
        self.instructions = schedule.instructions
        self.cursor = 0
        self.holds: Counter[int] = Counter()
        self.arrived: set[int] = set()  # buckets whose values may be read
        self.in_use: Counter[int] = Counter()  # by calls that are really open, whatever the schedule says
        self.in_flight: list[int] = []
        self.depth = schedule.facts.depth
        self.open_calls: dict[Call, list[tuple[int, ...]]] = {}
        self.at_run: list[frozenset[int]] = []  # what was resident at each Run
        self.peak = 0

    def next_event(self) -> Instruction | None:
        rest = self.instructions[self.cursor :]
        return next((i for i in rest if isinstance(i, Run | End | Reduce | Update)), None)

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
            if not isinstance(self.instructions[self.cursor], Unshard | Reshard | Settle):
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
            case Run(_, uses):
                assert self.arrived.issuperset(uses)
            case Reshard(bucket):
                self.holds[bucket] -= 1
                if not self.holds[bucket]:
                    assert not self.in_use[bucket]
                    self.arrived.remove(bucket)
            case Reduce(bucket):
                assert bucket not in self.in_flight
                self.in_flight.append(bucket)
                assert len(self.in_flight) <= self.depth
            case Settle(bucket):
                assert self.in_flight.pop(0) == bucket  # in the order of the reductions
            case Update(bucket):
                assert bucket not in self.in_flight
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
    assert not executor.resident()
    assert not executor.in_flight
    return executor


# memory


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
    return [
        open_uses[n].union(*stretches[stretch : stretch + prefetch + 1]) for n, stretch in enumerate(of_run)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_records(seed: int) -> None:
    record, facts = random_case(seed)
    plain = build(record, facts)
    verify(plain)
    replay(plain)
    schedule = compile_schedule(record, facts)
    executor = replay(schedule)
    assert is_legal(schedule)

    allowed = allowed_at_runs(record, facts.prefetch)
    runs = [event for event in record if isinstance(event, Entered)]
    before: frozenset[int] = frozenset()
    for run, resident, bound in zip(runs, executor.at_run, allowed, strict=True):
        assert resident - facts.keep <= (bound if run.uses else bound | before)
        before = resident
    gathers = Counter(bucket for kind, bucket in schedule.collectives() if kind == "all_gather")
    assert gathers <= Counter(bucket for kind, bucket in plain.collectives() if kind == "all_gather")
    assert all(gathers[bucket] == 1 for bucket in facts.keep)
    reductions = [bucket for kind, bucket in schedule.collectives() if kind == "reduce_scatter"]
    assert reductions == [event.bucket for event in record if isinstance(event, Ready)]


@pytest.mark.parametrize("prefetch", range(4))
@pytest.mark.parametrize("eager", [False, True])
def test_peak_of_a_stack_of_blocks(prefetch: int, eager: bool) -> None:
    """One bucket a call, no nesting: 1 + prefetch buckets, whether a block is one call or several."""
    record = stack(blocks=8, micro_steps=2, calls=3 if eager else 1)
    executor = replay(compile_schedule(record, stack_facts(8, prefetch)))
    assert executor.peak == 1 + prefetch


# mutations


def is_legal(schedule: Schedule) -> bool:
    """What a legal schedule is, by definition and in quadratic time."""
    instructions, facts = schedule.instructions, schedule.facts
    buckets = {bucket.id: bucket for bucket in facts.buckets}
    length = len(instructions)
    for i in instructions:
        named = i.uses if isinstance(i, Run) else () if isinstance(i, End) else (i.bucket,)
        if not buckets.keys() >= set(named):
            return False

    def positions(*wanted: Instruction) -> list[int]:
        return [n for n, i in enumerate(instructions) if i in wanted]

    # The calls are the record's. Each has an End unless its Left directly follows its Entered and no equal call
    # is open; spans[n]: instructions between the start and the end of the call that Run n begins.
    events = [event for event in schedule.record if not isinstance(event, Micro)]
    expected: list[Instruction] = []
    spans: dict[int, int] = {}
    places = [n for n, i in enumerate(instructions) if isinstance(i, Run | End | Reduce)]
    begun: list[tuple[Call, int, int]] = []  # call, index of its event, number of its Run among the places
    for n, event in enumerate(events):
        if isinstance(event, Entered):
            begun.append((event.call, n, len(expected)))
            expected.append(Run(event.call, event.uses))
        elif isinstance(event, Ready):
            expected.append(Reduce(event.bucket))
        elif isinstance(event, Left):
            mine = [entry for entry in begun if entry[0] == event.call]
            begun.remove(mine[-1])
            if len(mine) > 1 or mine[-1][1] != n - 1:
                if len(expected) >= len(places):
                    return False
                spans[mine[-1][2]] = len(expected)
                expected.append(End(event.call))
    if [instructions[n] for n in places] != expected:
        return False

    for bucket in buckets:
        # held[n]: holds before instruction n
        held = [0]
        for i in instructions:
            held.append(held[-1] + (i == Unshard(bucket)) - (i == Reshard(bucket)))
        if min(held) < 0 or held[-1]:
            return False
        starts = [n for n in positions(Unshard(bucket)) if held[n] == 0]
        stops = [n for n in positions(Reshard(bucket)) if held[n + 1] == 0]
        waits = positions(Wait(bucket))
        if not all(held[n] for n in waits):
            return False
        if not all(any(start < n < stop for n in waits) for start, stop in zip(starts, stops, strict=True)):
            return False
        for place, n in enumerate(places):
            run = instructions[n]
            if isinstance(run, Run) and bucket in run.uses:
                end = places[spans[place]] if place in spans else n
                home = [(a, b) for a, b in zip(starts, stops, strict=True) if a < n and end < b]
                if not home or not any(home[0][0] < wait < n for wait in waits):
                    return False
        if bucket in facts.keep and len(starts) != 1:
            return False

        reduces, settles = positions(Reduce(bucket)), positions(Settle(bucket))
        updates = positions(Update(bucket))
        if not buckets[bucket].trainable:
            if reduces or settles or updates:
                return False
            continue
        merged = sorted(reduces + settles)
        if not reduces or merged[::2] != reduces or merged[1::2] != settles or len(merged) % 2:
            return False
        if len(updates) != 1 or updates[0] < settles[-1]:
            return False

    for n in range(length):
        flight = sum(isinstance(i, Reduce) - isinstance(i, Settle) for i in instructions[: n + 1])
        if flight > facts.depth:
            return False
    first_update = min((n for n, i in enumerate(instructions) if isinstance(i, Update)), default=length)
    return not any(isinstance(i, Unshard | Wait | Run | End | Reduce) for i in instructions[first_update:])


def mutate(rng: random.Random, instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    out = list(instructions)
    n = rng.randrange(len(out))
    match rng.choice(["delete", "duplicate", "swap", "swap far", "move", "move near", "retarget"]):
        case "delete":
            del out[n]
        case "duplicate":
            out.insert(rng.randint(0, len(out)), out[n])
        case "swap":
            other = min(n + 1, len(out) - 1)
            out[n], out[other] = out[other], out[n]
        case "swap far":
            other = rng.randrange(len(out))
            out[n], out[other] = out[other], out[n]
        case "move":
            out.insert(rng.randint(0, len(out) - 1), out.pop(n))
        case "move near":
            instruction = out.pop(n)
            out.insert(max(0, n + rng.randint(-4, 4)), instruction)
        case "retarget":
            instruction = out[n]
            if not isinstance(instruction, Run | End):
                out[n] = replace(instruction, bucket=rng.randint(0, 7))
    return tuple(out)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_verifier_rejects_mutations(stage: int) -> None:
    keep = frozenset(range(5)) if stage < 3 else frozenset[int]()
    facts = replace(stack_facts(5, 1), keep=keep, update_by_bucket=stage == 2)
    schedule = compile_schedule(stack(5, micro_steps=1 if stage == 1 else 2, calls=1), facts)
    rejected = judge(schedule, random.Random(stage), rounds=150)
    assert rejected >= 100


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_the_verifier_rejects_mutations_of_random_schedules(seed: int) -> None:
    """Exactly the illegal ones: a legal mutation, such as a gather issued elsewhere, passes."""
    assert judge(compile_schedule(*random_case(seed)), random.Random(seed), rounds=40) >= 10


def judge(schedule: Schedule, rng: random.Random, rounds: int) -> int:
    """Mutate, and compare the verifier with ``is_legal``; how many mutations were illegal."""
    rejected = 0
    for _ in range(rounds):
        mutated = replace(schedule, instructions=mutate(rng, schedule.instructions))
        if is_legal(mutated):
            verify(mutated)
        else:
            rejected += 1
            with pytest.raises(ScheduleError, match=r"^instruction \d+, "):
                verify(mutated)
    return rejected


# size


def stack(blocks: int, micro_steps: int, calls: int) -> tuple[Event, ...]:
    """A stack of blocks, one bucket each, that run as ``calls`` calls one after the other."""
    record: list[Event] = []
    for _ in range(micro_steps):
        phases: tuple[Phase, Phase] = ("forward", "backward")
        for phase in phases:
            for block in range(blocks) if phase == "forward" else reversed(range(blocks)):
                for part in range(calls):
                    call = Call(f"layers.{block}.{part}", phase)
                    record += [Entered(call, (block,)), Left(call)]
                if phase == "backward":
                    record.append(Ready(block))
        record.append(Micro())
    return tuple(record)


def stack_facts(blocks: int, prefetch: int) -> Facts:
    buckets = tuple(BucketFacts(i, f"layers.{i}", 1, True) for i in range(blocks))
    return Facts(buckets, frozenset(), depth=2, prefetch=prefetch, update_by_bucket=False)


def test_a_large_schedule_is_made_quickly() -> None:
    """64 blocks, 8 micro-steps: 3,000 instructions in 20 ms or so; the bound only catches a quadratic pass."""
    record, facts = stack(blocks=64, micro_steps=8, calls=1), stack_facts(64, prefetch=2)
    began = time.process_time()
    schedule = compile_schedule(record, facts)
    assert schedule.fingerprint
    assert time.process_time() - began < 0.5
    replay_length = len(schedule.instructions)
    assert replay_length > 3000
