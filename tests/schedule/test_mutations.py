"""The verifier against mutated schedules, which a second definition of "legal" judges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.marks import daily
from tests.support.schedules import SEEDS, random_case, stack, stack_facts, stack_with_needs, with_needs
from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    Call,
    End,
    Entered,
    Free,
    Instruction,
    Left,
    Micro,
    Needed,
    Offload,
    Ready,
    Reduce,
    Release,
    Reload,
    Reshard,
    Run,
    Schedule,
    Settle,
    Stage,
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
        none = isinstance(i, End | Free | Offload | Release | Reload)
        named = i.uses if isinstance(i, Run) else () if none else (i.bucket,)
        if not buckets.keys() >= set(named):
            return False

    def positions(*wanted: Instruction) -> list[int]:
        return [n for n, i in enumerate(instructions) if i in wanted]

    # The calls are the record's. Each has an End unless its Left directly follows its Entered and no equal
    # call is open. spans: from a Run's place among the Run, End and Reduce instructions to that of its End.
    expected: list[Instruction] = []
    spans: dict[int, int] = {}
    places = [n for n, i in enumerate(instructions) if isinstance(i, Run | End | Reduce)]
    begun: list[tuple[Call, int, int]] = []  # call, index of its event, number of its Run among the places
    needs: dict[tuple[Call, int], int] = {}  # -> the place in front of the need
    n = -1
    backwards: list[int] = []  # of each of them: how many backwards have ended before it
    ended = 0
    for event in schedule.record:
        backwards += [ended] * (len(expected) - len(backwards))
        ended += isinstance(event, Micro)
        if isinstance(event, Needed):
            needs[event.call, event.number] = len(expected) - 1
        n += not isinstance(event, Micro | Needed)
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
    backwards += [ended] * (len(expected) - len(backwards))
    if [instructions[n] for n in places] != expected:
        return False

    moves = {(i.call, i.number) for i in instructions if isinstance(i, Offload | Release | Reload)}
    if moves and not facts.offload:
        return False
    for call, number in moves:
        out = [positions(kind(call, number)) for kind in (Offload, Release, Reload)]
        runs = [place for place, i in enumerate(expected) if isinstance(i, Run) and i.call == call]
        if list(map(len, out)) != [1, 1, 1] or not 0 <= number < len(runs) or (call, number) not in needs:
            return False
        over = places[spans.get(runs[number], runs[number])]
        if not over < out[0][0] < out[1][0] < out[2][0] < places[needs[call, number]]:
            return False

    gathers: set[int] = set()
    for bucket in buckets:
        # held[n]: holds before instruction n
        held = [0]
        for i in instructions:
            held.append(held[-1] + (i == Unshard(bucket)) - (i == Reshard(bucket)))
        stays = held[-1] == 1 and not buckets[bucket].trainable
        if min(held) < 0 or (held[-1] and not stays):
            return False
        starts = [n for n in positions(Unshard(bucket)) if held[n] == 0]
        gathers.update(starts if not stays else ())
        stops = [n for n in positions(Reshard(bucket)) if held[n + 1] == 0] + [length] * stays
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
        if bucket in facts.kept_by_stage and len(starts) != 1:
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
        flight = sum(isinstance(i, Reduce) - isinstance(i, Settle) for i in instructions[: n + 1])  # none is slight
        if flight > facts.depth:
            return False
    frees = positions(Free())
    if len(frees) > (1 if facts.free else 0):
        return False
    if any(places[start] < n < places[end] for n in frees for start, end in spans.items()):
        return False
    staged = [len(positions(Stage(bucket))) for bucket in buckets]
    if staged != [int(facts.stage)] * len(buckets):
        return False
    first = min(positions(*map(Update, buckets)), default=length)
    if not facts.update_by_bucket and any(isinstance(i, Settle) for i in instructions[first:]):
        return False
    over = min((n for n, i in enumerate(instructions) if isinstance(i, Update | Free)), default=length)
    return all(isinstance(i, Settle | Update | Reshard) for i in instructions[over + 1 :])


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
            if isinstance(instruction, Offload | Release | Reload):
                out[n] = replace(instruction, number=instruction.number + rng.choice([-1, 1]))
            elif not isinstance(instruction, Run | End | Free):
                out[n] = replace(instruction, bucket=rng.randint(0, 7))
    return tuple(out)


def test_most_edits_that_stay_legal_move_communication() -> None:
    """The second definition is no copy of "unchanged": it lets gathers, waits, drops and settlings move."""
    schedule = compile_schedule(stack(5, micro_steps=1, calls=1), stack_facts(5, 2))
    rng = random.Random(0)
    edited = {mutate(rng, schedule.instructions) for _ in range(400)} - {schedule.instructions}
    legal = [each for each in edited if is_legal(replace(schedule, instructions=each))]
    assert len(legal) >= 10


@daily("stage", [2, 3], [1])
@daily("everything", [True], [False], ids=lambda all_of_it: "everything" if all_of_it else "plain")
def test_the_verifier_rejects_mutations(stage: int, everything: bool) -> None:
    keep = frozenset(range(5)) if stage < 3 else frozenset[int]()
    facts = replace(stack_facts(5, 1), kept_by_stage=keep, update_by_bucket=stage == 2)
    if everything:
        facts = replace(facts, free=True, stage=True, keep=frozenset({0, 2}))
    schedule = compile_schedule(stack(5, micro_steps=1 if stage == 1 else 2, calls=1), facts)
    assert everything == any(isinstance(i, Stage) for i in schedule.instructions)
    rejected = judge(schedule, random.Random(stage), rounds=150)
    assert rejected >= 100


@daily("seed", SEEDS[:5], SEEDS[5:40])
def test_the_verifier_rejects_mutations_of_random_schedules(seed: int) -> None:
    """Exactly the illegal ones: a legal mutation, such as a gather issued elsewhere, passes."""
    assert judge(compile_schedule(*random_case(seed)), random.Random(seed), rounds=40) >= 10


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_verifier_rejects_mutated_moves(micro_steps: int) -> None:
    facts = replace(stack_facts(5, 1), offload=True)
    schedule = compile_schedule(stack_with_needs(5, micro_steps), facts)
    assert judge(schedule, random.Random(micro_steps), rounds=300) >= 150


@daily("seed", SEEDS[:5], SEEDS[5:30])
def test_the_verifier_rejects_mutated_moves_of_random_schedules(seed: int) -> None:
    record, facts = random_case(seed)
    schedule = compile_schedule(with_needs(record, random.Random(seed)), replace(facts, offload=True))
    judge(schedule, random.Random(seed), rounds=40)


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
            with pytest.raises(ScheduleError, match=r"^\[ZW\d+\] instruction \d+, "):
                verify(mutated)
    return rejected
