"""Records to make schedules from: random ones, and a stack of equal blocks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from zeroweave.schedule import (
    BucketFacts,
    Call,
    Costs,
    Entered,
    Event,
    Facts,
    Left,
    Line,
    Micro,
    Needed,
    Phase,
    Ready,
)
from zeroweave.schedule.instructions import project

SEEDS = range(150)


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


def with_needs(record: tuple[Event, ...], rng: random.Random) -> tuple[Event, ...]:
    """The record with a need of what some forward calls have saved, anywhere behind their ends."""
    begun: Counter[Call] = Counter()
    open_calls: dict[Call, list[int]] = {}
    inserted: dict[int, list[Event]] = {}
    for index, event in enumerate(record):
        if isinstance(event, Entered):
            open_calls.setdefault(event.call, []).append(begun[event.call])
            begun[event.call] += 1
        elif isinstance(event, Left):
            number = open_calls[event.call].pop()
            if event.call.phase == "forward" and rng.random() < 0.8:
                place = rng.randint(index + 1, len(record))
                inserted.setdefault(place, []).append(Needed(event.call, number, rng.randrange(4)))
    return tuple(
        each for index in range(len(record) + 1) for each in (*inserted.get(index, ()), *record[index : index + 1])
    )


def stack_with_needs(blocks: int, micro_steps: int, nbytes: int = 8) -> tuple[Event, ...]:
    """As `stack`, each block one call; each backward asks first for what its forward has saved."""
    record: list[Event] = []
    begun: Counter[Call] = Counter()
    for event in stack(blocks, micro_steps, calls=1):
        if isinstance(event, Entered) and event.call.phase == "backward":
            record.append(Needed(Call(event.call.name, "forward"), begun[event.call], nbytes))
            begun[event.call] += 1
        record.append(event)
    return tuple(record)


def due_together(seed: int) -> tuple[tuple[Event, ...], Facts]:
    """A random case where each backward's gradients are complete at its end, at once or nearly, with costs."""
    rng = random.Random(seed)
    record, facts = random_case(seed)
    out: list[Event] = []
    ready: list[Event] = []
    for event in record:
        if isinstance(event, Ready):
            ready.append(event)
            continue
        if isinstance(event, Micro):
            out += ready
            ready.clear()
        out.append(event)
    events = len(project(tuple(out)))
    costs = Costs(
        compute=tuple(rng.choice([0.0, 0.5, 2.0]) for _ in range(events)),
        update={},
        gathers={},
        reductions={},
        gather=Line(1.0, 0.25),
        reduce=Line(1.0, 0.25),
        activations=(0,) * events,
    )
    return tuple(out), replace(facts, costs=costs)
