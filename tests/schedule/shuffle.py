"""Random legal schedules of a record: random settings, then random moves of communication that `verify` accepts."""

from __future__ import annotations

import random
from dataclasses import replace

from zeroweave.errors import ScheduleError
from zeroweave.schedule import (
    PASSES,
    Costs,
    Instruction,
    Reshard,
    Schedule,
    Settle,
    Unshard,
    Wait,
    build,
    verify,
)

MOVES = 60


def shuffled(schedule: Schedule, costs: Costs | None, rng: random.Random) -> Schedule:
    """Another legal schedule of the same record, the same for equal arguments."""
    ids = [bucket.id for bucket in schedule.facts.buckets]
    facts = replace(
        schedule.facts,
        depth=rng.randint(1, 4),
        prefetch=rng.choice([0, 1, 2, 3, "auto"]),
        keep=frozenset(rng.sample(ids, rng.randint(0, len(ids)))),
        update_by_bucket=schedule.facts.update_by_bucket and rng.random() < 0.5,
        costs=costs,
    )
    made = build(schedule.record, facts)
    for improve in PASSES:
        if rng.random() < 0.8:
            made = improve(made)
    verify(made)
    for _ in range(MOVES):
        moved = replace(made, instructions=_move(made.instructions, rng))
        try:
            verify(moved)
        except ScheduleError:
            continue
        made = moved
    return made


def _move(instructions: tuple[Instruction, ...], rng: random.Random) -> tuple[Instruction, ...]:
    """One gather, wait, drop or settling elsewhere; or a second hold around some part of the step."""
    out = list(instructions)
    if rng.random() < 0.1:
        bucket = rng.choice([i.bucket for i in out if isinstance(i, Unshard)])
        start = rng.randrange(len(out))
        out.insert(rng.randint(start, len(out)), Reshard(bucket))
        out[start:start] = [Unshard(bucket), Wait(bucket)][: rng.randint(1, 2)]
        return tuple(out)
    movable = [n for n, i in enumerate(out) if isinstance(i, Unshard | Wait | Reshard | Settle)]
    instruction = out.pop(rng.choice(movable))
    out.insert(rng.randint(0, len(out)), instruction)
    return tuple(out)
