"""What the simulator predicts of a schedule is what the replay does by a virtual clock, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.runtime.playing import ITEM, Player
from tests.support.schedules import random_case, stack
from zeroweave.schedule import (
    BucketFacts,
    Costs,
    Event,
    Facts,
    Line,
    Micro,
    Ready,
    Schedule,
    compile_schedule,
    costs_of,
    simulate,
)
from zeroweave.schedule.instructions import project


def seconds(rng: random.Random) -> float:
    """Sums of these are exact."""
    return rng.randint(1, 128) / 64


def random_costs(rng: random.Random, record: tuple[Event, ...], facts: Facts) -> Costs:
    ids = [bucket.id for bucket in facts.buckets]
    events = len(project(record))
    line = Line(1.0, 1 / 64)
    return Costs(
        compute=tuple(seconds(rng) for _ in range(events)),
        update={b: seconds(rng) for b in ids},
        gathers={b: line.alpha + seconds(rng) for b in ids},
        reductions={b: line.alpha + seconds(rng) for b in ids},
        gather=line,
        reduce=line,
        activations=(0,) * events,
    )


def once_a_backward(record: Iterable[Event]) -> tuple[Event, ...]:
    """Without the contributions that come late."""
    out: list[Event] = []
    ready: set[int] = set()
    for event in record:
        if isinstance(event, Micro):
            ready.clear()
        elif isinstance(event, Ready):
            if event.bucket in ready:
                continue
            ready.add(event.bucket)
        out.append(event)
    return tuple(out)


def check(schedule: Schedule, costs: Costs) -> None:
    player, prediction = Player(schedule.facts, costs), simulate(schedule, costs)
    player.stand(schedule)
    step = player.play(schedule.record, schedule)
    assert step is not None, "the step departed from its schedule"
    assert max(player.clock.now, player.transport.free) == prediction.seconds
    assert step.waits == prediction.waits
    lanes = [(s.lane, s.start, s.stop) for s in prediction.spans if s.lane != "compute"]
    over = [(s.lane, prediction.over[s.index]) for s in prediction.spans if s.lane != "compute"]
    assert [(kind, over) for kind, _, _, over in player.transport.calls] == over
    assert [(o.kind, o.started, o.over) for o in step.operations] == lanes
    assert sorted(player.updated) == sorted(b.id for b in schedule.facts.buckets if b.trainable)
    # What was measured of the step predicts it again, and knows the computation that it was made of.
    again = costs_of([step])
    assert again.compute == costs.compute
    assert simulate(schedule, again) == prediction


SETTINGS = [
    {"prefetch": 0},
    {"prefetch": 1},
    {"prefetch": 2},
    {"prefetch": "auto"},
    {"prefetch": "auto", "depth": 4},
    {"prefetch": 1, "keep": "auto", "memory": 2000},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_stack_of_blocks(micro_steps: int, stage: int, settings: dict[str, object]) -> None:
    rng = random.Random(str(settings))
    record = stack(6, micro_steps, calls=1)
    buckets = tuple(BucketFacts(i, f"layers.{i}", ITEM * (rng.randint(1, 8) if i else 256), True) for i in range(6))
    keep = frozenset(range(6)) if stage == 2 else frozenset[int]()
    facts = Facts(buckets, keep, depth=2, prefetch=1, update_by_bucket=rng.random() < 0.5)
    costs = random_costs(rng, record, facts)
    schedule = compile_schedule(record, replace(facts, costs=costs, **settings))  # type: ignore[arg-type]
    check(schedule, costs)


@pytest.mark.parametrize("seed", range(60))
def test_random_records(seed: int) -> None:
    """Calls that nest and overlap, frozen buckets, any depth and prefetch."""
    rng = random.Random(seed)
    record, facts = random_case(seed)
    record = once_a_backward(record)
    buckets = tuple(replace(b, nbytes=ITEM * (rng.randint(1, 8) if b.id else 256)) for b in facts.buckets)
    costs = random_costs(rng, record, facts)
    facts = replace(facts, buckets=buckets, costs=costs)
    if rng.random() < 0.3:
        facts = replace(facts, prefetch="auto")
    check(compile_schedule(record, facts), costs)
