"""What is left of reductions when the optimizer allocates: nothing, unless buckets are updated one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
import torch

import zeroweave as zw
from tests.runtime.playing import ITEM, Player
from tests.support.marks import MODES, slow
from tests.support.schedules import SEEDS, due_together
from tests.support.twins import WIDTH, Net
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
    Ready,
    Schedule,
    Unshard,
    Update,
    build,
    compile_schedule,
    simulate,
)

X, Y = Call("x", "backward"), Call("y", "backward")
BUCKETS = tuple(BucketFacts(i, "abcd"[i], 8 * ITEM, True) for i in range(4))
RECORD = (Entered(X, (3,)), Left(X), Ready(3), Ready(2), Entered(Y, (1,)), Left(Y), Ready(1), Ready(0), Micro())
COSTS = Costs((1.0, 0.0, 1.0, 1.0, 0.0, 1.0), {}, {}, {}, Line(1.0), Line(1.0, 1 / 256), (0,) * 6)


class Noting(Player):
    """Notes the bytes of gradient flats that are in flight at each update."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts, COSTS)
        self.staged: list[int] = []
        self.together: list[list[int]] = []
        """what was updated in one call"""

    def _update(self, buckets: Sequence[int]) -> None:
        self.together.append(list(buckets))
        self.staged += [self.runtime.gradients.flats.now] * len(buckets)
        super()._update(buckets)


def played(schedule: Schedule, record: Iterable[Event], followed: bool) -> Noting:
    player = Noting(schedule.facts)
    runtime, replay = player.runtime, player.runtime.replay
    runtime.next_window(schedule if followed else None)
    replay.reducing = True
    for event in record:
        match event:
            case Entered(call, uses):
                replay.entered(call, uses)
            case Left(call):
                replay.left(call)
            case Ready(bucket):
                player.deliver(bucket)
    replay.backward_ended(True)
    runtime.gradients.end_backward()
    replay.finish(player._update, frozenset(range(4)))
    assert sorted(player.updated) == [0, 1, 2, 3]
    assert [bucket for kind, bucket, *_ in player.transport.calls if kind == "reduce_scatter"] == [3, 2, 1, 0]
    return player


SWAPPED = (*RECORD[4:6], *RECORD[:4], *RECORD[6:])


@pytest.mark.parametrize("by_bucket", [False, True])
@pytest.mark.parametrize("course", ["followed", "departed", "on demand"])
def test_nothing_is_in_flight_at_the_first_update(course: str, by_bucket: bool) -> None:
    facts = Facts(BUCKETS, frozenset(), 2, 1, by_bucket, costs=COSTS)
    schedule = compile_schedule(RECORD, facts)
    player = played(schedule, SWAPPED if course == "departed" else RECORD, course != "on demand")
    replay = player.runtime.replay
    assert replay.departures == (course == "departed")
    if by_bucket and course == "followed":
        # what was in flight at the last reduction, and less with each update of what has settled
        assert player.staged == sorted(player.staged, reverse=True)
        assert player.staged[0] == player.runtime.gradients.flats.peak > player.staged[-1] == 0
    else:
        assert player.staged == [0] * 4


@pytest.mark.parametrize("course", ["followed", "departed", "on demand"])
def test_neighbouring_updates_come_in_one_call(course: str) -> None:
    schedule = compile_schedule(RECORD, Facts(BUCKETS, frozenset(), 2, 1, update_by_bucket=True, costs=COSTS))
    player = played(schedule, SWAPPED if course == "departed" else RECORD, course != "on demand")
    updates = [each.bucket if isinstance(each, Update) else None for each in player.runtime.replay.executed]
    assert player.together == [list(run) for neighbours, run in groupby(updates, lambda b: b is not None) if neighbours]
    assert 1 < len(player.together) < 4 if course == "followed" else len(player.together) == 1


@pytest.mark.parametrize("seed", SEEDS[::5])
def test_updates_one_by_one_reach_no_higher(seed: int) -> None:
    """Of all that a schedule decides: flats, gradient flats and activations."""
    rng = random.Random(seed)
    record, facts = due_together(seed)
    assert facts.costs is not None
    costs = replace(facts.costs, activations=tuple(rng.randrange(3) for _ in facts.costs.activations))
    peaks = [
        simulate(make(record, replace(facts, costs=costs, update_by_bucket=by_bucket)), costs).peak
        for make in (build, compile_schedule)
        for by_bucket in (False, True)
    ]
    assert peaks[1] <= peaks[0] and peaks[3] <= peaks[2]


@slow("1-aot_eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_steps_as_a_whole_finds_no_staging(stage: int, mode: str) -> None:
    """In the first step, in one that follows its schedule, and in one that departs."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with zw.initialize(model, optimizer, {"stage": stage, "compile": MODES[mode]}) as engine:
        staging, staged = engine._runtime.gradients.flats, []
        optimizer.register_step_pre_hook(lambda *_: staged.append(staging.now))
        for step in range(4):
            x = torch.randn(3, WIDTH)
            loss = engine(x).sum()
            if step == 3:
                loss = loss + engine(x).sum()
            engine.backward(loss)
            engine.step()
        assert staged == [0] * 4 and staging.peak > 0
        assert engine.stats.departures == 1


@pytest.mark.parametrize("departs", [False, True])
def test_kept_buckets_are_gathered_in_the_order_of_the_schedule(departs: bool) -> None:
    """Also by a rank that departs at its first call, while the others do not."""
    first, second = Call("x", "forward"), Call("y", "forward")
    record = (
        Entered(first, (0, 1)),
        Left(first),
        Entered(second, (2, 3)),
        Left(second),
        *map(Ready, range(4)),
        Micro(),
    )
    schedule = compile_schedule(record, Facts(BUCKETS, frozenset(range(4)), 2, 1, False))
    player = Noting(schedule.facts)
    replay = player.runtime.replay
    player.runtime.next_window(schedule)
    replay.entered(*((second, (2, 3)) if departs else (first, (0, 1))))
    assert replay.departures == departs
    gathered = [i for i in replay.executed if isinstance(i, Unshard)]
    assert gathered == list(map(Unshard, range(4)))
