"""The verifier against mutated schedules, which a second definition of "legal" judges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.schedule.cases import SEEDS, random_case, stack, stack_facts
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    Call,
    End,
    Entered,
    Instruction,
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
    compile_schedule,
    verify,
)


def is_legal(schedule: Schedule) -> bool:
    """What a legal schedule is, in another way than the verifier: by definition, in quadratic time."""
    instructions, facts = schedule.instructions, schedule.facts
    buckets = {bucket.id: bucket for bucket in facts.buckets}
    length = len(instructions)
    for i in instructions:
        named = i.uses if isinstance(i, Run) else () if isinstance(i, End) else (i.bucket,)
        if not buckets.keys() >= set(named):
            return False

    def positions(*wanted: Instruction) -> list[int]:
        return [n for n, i in enumerate(instructions) if i in wanted]

    # The calls are the record's. Each has an End unless its Left directly follows its Entered and no equal
    # call is open. spans: from a Run's place among the Run, End and Reduce instructions to that of its End.
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
    assert is_legal(schedule)
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
