"""Schedules in which it pays to update first what the next step needs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.support.schedules import stack, stack_facts
from zeroweave.schedule import PASSES, Costs, Line, Run, Schedule, compile_schedule
from zeroweave.schedule.instructions import project
from zeroweave.schedule.passes import heads

BLOCKS, SIZE = 6, 100
RECORD = stack(BLOCKS, 2, calls=1)
ROOM = 2 * BLOCKS * SIZE
"""All buckets may stay gathered."""
WITHOUT = tuple(each for each in PASSES if each is not heads)


def costs_of(gather: float = 1.6, reduction: float = 0.5, update: float = 1.0) -> Costs:
    events = project(RECORD)
    return Costs(
        compute=tuple(1.0 if isinstance(event, Run) else 0.0 for event in events),
        update=dict.fromkeys(range(BLOCKS), update),
        gathers=dict.fromkeys(range(BLOCKS), gather),
        reductions=dict.fromkeys(range(BLOCKS), reduction),
        gather=Line(0.0, gather / SIZE),
        reduce=Line(0.0, reduction / SIZE),
        activations=(0,) * len(events),
    )


def made(
    stage: int = 3,
    by_bucket: bool = True,
    costs: Costs | None = None,
    passes: Any = PASSES,
    sizes: Mapping[int, int] | None = None,
    **more: Any,
) -> Schedule:
    """`sizes`: of the buckets that have another one."""
    plain = stack_facts(BLOCKS, 1)
    facts = replace(
        plain,
        buckets=tuple(replace(bucket, nbytes=(sizes or {}).get(bucket.id, SIZE)) for bucket in plain.buckets),
        kept_by_stage=frozenset(range(BLOCKS)) if stage < 3 else frozenset(),
        update_by_bucket=by_bucket,
        **{"regather": True, "prefetch": "auto", "keep": "auto", "costs": costs or costs_of(), "memory": ROOM} | more,  # type: ignore[arg-type]
    )
    return compile_schedule(RECORD, facts, passes)
