"""What tells that memory is short: windows that train, and nothing that is tried out or lies between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from tests.distributed.schedule.test_memory import ALL, kept, training
from tests.support.memory import CountedClock
from tests.support.zoo import regression, rows
from zeroweave.engine.agreements import Agreements
from zeroweave.engine.headroom import Headroom
from zeroweave.schedule import Costs, Line, fixed

pytestmark = pytest.mark.usefixtures("flats_apart")

SMALL = 78_000
"""Bytes of a device that has room for some buckets more and not for all."""
MOST = SMALL * 95 // 100

MUCH = 57_900
"""Bytes beside those between steps, with which the device is all but full."""


def tight(clock: CountedClock) -> None:
    """For a moment much is in use, and the allocator has to try again."""
    clock.add(MUCH)
    clock.refused += 1
    clock.add(-clock.added)


def profiles(engine: Any, clock: CountedClock) -> None:
    with engine.profiling():
        tight(clock)
        regression(engine, engine.module, rows(engine.rank, 0), engine.backward)
        tight(clock)
        engine.step()


def evaluates(engine: Any, clock: CountedClock) -> None:
    engine.eval()
    with torch.no_grad():
        engine(rows(engine.rank, 0)[0])
        tight(clock)
    engine.train()


def reads(engine: Any, clock: CountedClock) -> None:
    with engine.full_parameters():
        tight(clock)


def nothing(engine: Any, clock: CountedClock) -> None:
    tight(clock)


BESIDE = {"profiling": profiles, "evaluation": evaluates, "full parameters": reads, "between": nothing}


def shrunk(beside: Callable[[Any, CountedClock], None] | None) -> list[int]:
    """Buckets that are kept before a window in which the allocator tries again, and behind it."""
    with training(SMALL) as (engine, clock, step):
        for _ in range(4):
            step()
        if beside is not None:
            beside(engine, clock)
        found = [len(kept(engine))]
        for refused in (0, 1, 0):
            step(refused=refused)
            found.append(len(kept(engine)))
        return found


def test_growth_is_that_of_windows_that_train() -> None:
    plain = shrunk(None)
    assert plain[0] == plain[1] > plain[2] == plain[3]
    assert {name: shrunk(each) for name, each in BESIDE.items()} == dict.fromkeys(BESIDE, plain)


class Board:
    """What a rank notes, and a device whose allocator has tried again so often."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.note = self.noted.append
        self.refused, self.skips = 0, False
        self.notes = self.clock = self

    def strain(self) -> tuple[int, int]:
        return 0, self.refused


@pytest.mark.parametrize("aborted", [False, True])
def test_a_window_that_an_exception_has_ended_is_closed(aborted: bool) -> None:
    board, costs = Board(), Costs((), {}, {}, {}, Line(), Line(), (), room=1000)
    headroom = Headroom(cast(Any, board), cast(Any, board), 1)
    headroom.watch(costs)
    headroom.begin()
    if aborted:
        headroom.abort()
    board.refused += 1
    headroom.look()
    assert bool(board.noted) is not aborted


def test_zero_grad_behind_an_exception_closes_it() -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("no memory is left")

    with training(SMALL) as (engine, _, step):
        for _ in range(4):
            step()
        headroom = engine._scheduler._headroom
        engine.module.leave.register_forward_pre_hook(refuse)
        with pytest.raises(MemoryError):
            step()
        assert headroom._refusals is not None
        engine.zero_grad()
        assert headroom._refusals is None


def test_what_was_in_use_before_the_first_step_leaves_the_margin_on() -> None:
    for before in (False, True):
        with training(SMALL) as (engine, clock, step):
            if before:
                tight(clock)
            for _ in range(4):
                step()
            count = len(kept(engine))
            step(MOST)
            assert len(kept(engine)) == count
            step(MOST + 1)
            assert len(kept(engine)) < count


def alternating(other: bool) -> list[int]:
    """Buckets that are kept while windows grow, behind windows of another kind or not; those fill nothing."""
    with training(SMALL) as (engine, _, step):
        for _ in range(4):
            step()
        filled = engine._scheduler._kind
        for _ in range(4 if other else 0):
            regression(engine, engine.module, rows(engine.rank, 0), engine.backward)
            step(60_000)
        if other:
            assert not engine._scheduler._fills(engine._scheduler._kind)
        for _ in range(8):  # until others are not expected any more
            step()
        assert engine._scheduler._kind is filled
        counts = [len(kept(engine))]
        for most in (MOST, MOST + 1, 0):
            step(most)
            counts.append(len(kept(engine)))
        return counts


def test_each_kind_of_window_has_the_limit_of_its_own_schedule() -> None:
    alone = alternating(other=False)
    assert alone[0] == alone[1] > alone[2] == alone[3]
    assert alternating(other=True) == alone


def grown(later: int) -> tuple[Any, Any, int]:
    """Two kinds of windows, and the most that was in use: one has grown, and the other was measured after that.

    Those of the other have two backwards and take `later` bytes.
    """
    with training(SMALL) as (engine, clock, step):
        for _ in range(4):
            step()
        step(MOST + 1)
        one = engine._scheduler._kind
        for _ in range(4):
            regression(engine, engine.module, rows(engine.rank, 0), engine.backward)
            step(later)
        other = engine._scheduler._kind
        assert other.measured is not None and other.measured.shape != one.measured.shape
        return one, other, clock.peak()


def test_what_a_kind_has_grown_by_is_foreseen_of_others_once() -> None:
    one, other, most = grown(later=0)
    assert fixed(other.costs) == fixed(one.costs), "it may come again"
    one, other, most = grown(later=MOST + 1)
    assert fixed(other.costs) > fixed(one.costs)
    assert other.costs.peak <= most, "it was there when that was measured"


def asked(steps: int, **settings: Any) -> tuple[int, list[int]]:
    """How often the ranks asked each other for memory, and buckets that are kept, while each window tries again."""
    calls, memory = [], Agreements.memory

    def counting(self: Agreements, *figures: int) -> tuple[int, int]:
        calls.append(figures)
        return memory(self, *figures)

    with patch.object(Agreements, "memory", counting), training(SMALL, **settings) as (engine, _, step):
        counts = []
        for _ in range(steps):
            step(refused=1)
            counts.append(len(kept(engine)))
        return len(calls), counts


@pytest.mark.matrix
def test_where_nothing_can_be_spared_nobody_is_asked_again() -> None:
    for settings in ({}, {"keep": "none"}):  # the latter fills nothing that could be spared
        once, kept_once = asked(10, **settings)
        twice, kept_twice = asked(16, **settings)
        assert 0 < once == twice <= 4
        assert kept_twice == kept_once + [kept_once[0]] * 6


def test_what_just_fits_changes_nothing_and_a_byte_more_does() -> None:
    with training(SMALL) as (engine, clock, step), training(SMALL, memory_budget="none") as (bare, _, plain):
        for most in (0, 0, 0, 0):
            assert step(most) == plain()
        before, device = kept(engine), engine.stats.device
        assert set(kept(bare)) < set(before) < set(ALL) and bare.schedule.facts.memory is None
        assert clock.peak() <= device.foreseen <= device.budget + 20_000 and device.allocated == clock.peak()
        found = []
        for most in (MOST, MOST, MOST + 1, MOST + 1, 0):
            assert step(most) == plain()
            found.append(kept(engine))
        assert found[:2] == [before] * 2 and found[2:] == [found[2]] * 3
        assert set(kept(bare)) <= set(found[2]) and len(found[2]) < len(before)
        assert engine.stats.departures == 0
        told = [each.reason for each in engine._context.journal.take()]
        assert sum("memory is short" in each for each in told) == 1
