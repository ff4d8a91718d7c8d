"""The deadline in collectives: whom a waiting rank misses, and when it may say so. With a pretended clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.board import Board
from zeroweave.ranks.process import is_stopped, own
from zeroweave.ranks.status import StatusLine
from zeroweave.ranks.watcher import LOOK_SECONDS, SILENCE, Watcher

DEADLINE = 20.0


class Rank:
    """A rank with a ledger: `issues` collectives, `waits` for the last of them."""

    def __init__(self, board: Board) -> None:
        self.rank, self.line, self.ledger = board.rank, StatusLine(board), Ledger(board.world, board.rank)
        self.watcher = Watcher(
            self.line, lambda: (0, self.ledger.count), lambda _: None, self.ledger, DEADLINE, lambda: 0
        )

    def issues(self, times: int = 1) -> None:
        for _ in range(times):
            self.ledger.record("all_gather", self.ledger.count % 4, "float32", 1024)

    def waits(self, now: float) -> None:
        self.ledger.waiting = self.ledger.count, now

    def says(self, now: float) -> str | None:
        return self.watcher.look(now) or self.watcher.find(now)


def world(ranks: int) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(board) for board in [Board(rank, ranks, lambda: store) for rank in range(ranks)]]


def times(first: float, last: float) -> list[float]:
    return [first + index * LOOK_SECONDS for index in range(int((last - first) / LOOK_SECONDS) + 1)]


def first_word(ranks: list[Rank], of: Rank, first: float, last: float) -> tuple[float, str] | None:
    """When all live and look, the first thing that one says between two times."""
    for now in times(first, last):
        for rank in ranks:
            said = rank.says(now)
            if rank is of and said is not None:
                return now, said
    return None


@pytest.mark.oldest
def test_a_rank_that_does_not_come_is_named_after_the_deadline() -> None:
    here, there = both = world(2)
    for rank in both:
        rank.issues(3)
    there.ledger.call = "after step"
    here.issues()
    here.waits(5.0)
    assert first_word(both, here, 0.0, 5.0 + DEADLINE) is None
    found = first_word(both, here, 5.0 + DEADLINE, 5.0 + DEADLINE + 5.0)
    assert found is not None and found[0] <= 5.0 + DEADLINE + 3.0
    assert found[1] == (
        "rank 1 (after step, after 3 collectives) did not come to collective 4 "
        "('all_gather bucket 3, 1024 bytes of float32') within the deadline of 20 s"
    )


@pytest.mark.parametrize(
    ("call", "gathers_on_entry", "told"),
    [
        ("in forward", False, "waits for it in forward: at stages 1 and 2 the first forward behind a step() gathers"),
        ("in forward", True, "waits for it in forward: at stage 3 each forward gathers parameters"),
        ("after step", False, "waits for it after step, in a module that was called by itself: at stages 1 and 2"),
        ("in state_dict", False, "waits for it in state_dict: all ranks must make the engine's calls together"),
    ],
)
def test_who_waits_says_in_which_call_and_what_to_do(call: str, gathers_on_entry: bool, told: str) -> None:
    here, there = both = world(2)
    here.ledger.gathers_on_entry = gathers_on_entry
    here.ledger.call, there.ledger.call = call, "after step"
    here.issues()
    here.waits(0.0)
    found = first_word(both, here, 0.0, DEADLINE + 5.0)
    assert found is not None and f"within the deadline of 20 s; rank 0 {told}" in found[1]
    cures = ["full_parameters()" in found[1], "gather_after_step" in found[1]]
    assert cures == [call != "in state_dict", call != "in state_dict" and not gathers_on_entry]


def test_nobody_waits_for_a_rank_that_computes() -> None:
    """Each computes for ten deadlines, one after the other; only who waits for longer than one may complain."""
    here, there = both = world(2)
    here.issues(2)
    there.issues(2)
    assert first_word(both, here, 0.0, 10 * DEADLINE) is None
    assert first_word(both, there, 0.0, 10 * DEADLINE) is None


def test_who_comes_just_in_time_is_not_late() -> None:
    """It comes before the deadline, but its word of it is still under way when that has passed."""
    here, there = both = world(2)
    here.issues()
    here.waits(0.0)
    assert first_word(both, here, 0.0, DEADLINE) is None
    there.issues()
    for now in (DEADLINE + 0.5, DEADLINE + 1.5, DEADLINE + 40.0):
        assert here.says(now) is None, "nothing that the other rank has said is newer than the deadline"
    assert first_word(both, here, DEADLINE + 41.0, 3 * DEADLINE) is None


def test_a_rank_that_comes_nearer_has_time_again() -> None:
    """On a device the host runs ahead: one that is far behind, but goes on, is not missing."""
    here, there = both = world(2)
    here.issues(8)
    here.waits(0.0)
    for index in range(7):
        there.issues()
        assert first_word(both, here, index * 0.9 * DEADLINE, (index + 1) * 0.9 * DEADLINE - LOOK_SECONDS) is None
    found = first_word(both, here, 7 * 0.9 * DEADLINE, 9 * DEADLINE)
    assert found is not None and "after 7 collectives) did not come to collective 8" in found[1]


def test_who_waits_itself_is_not_blamed() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in an earlier collective."""
    for waiting in (0, 1):
        ranks = world(3)
        for rank, count in zip(ranks, (5, 4, 3), strict=True):
            rank.issues(count)
        ranks[0].waits(0.0)
        ranks[1].waits(0.0)
        found = first_word(ranks, ranks[waiting], 0.0, DEADLINE + 5.0)
        assert found is not None and found[1].startswith("rank 2 (") and "rank 1" not in found[1]


def test_a_silent_rank_that_is_missed_is_late_after_a_while() -> None:
    """Another thread of it may keep Python's lock: it may have come."""
    here, there = world(2)
    here.issues()
    assert here.says(0.0) is None and there.says(0.0) is None
    here.waits(1.0)
    assert all(here.says(look * LOOK_SECONDS) is None for look in range(1, SILENCE + 1))
    said = here.says((SILENCE + 1) * LOOK_SECONDS) or ""
    assert f"after 0 collectives, no sign of life for {SILENCE} s) did not come to collective 1" in said


def test_a_silent_rank_that_speaks_again_has_come() -> None:
    here, there = world(2)
    here.issues()
    here.waits(0.0)
    assert all(here.says(look * LOOK_SECONDS) is None for look in range(SILENCE))
    there.issues()
    there.says(SILENCE * LOOK_SECONDS)
    assert all(here.says(look * LOOK_SECONDS) is None for look in range(SILENCE, 3 * SILENCE))


def test_silence_is_counted_in_looks() -> None:
    """A machine that was suspended has not waited."""
    here, there = world(2)
    here.issues()
    here.waits(0.0)
    assert here.says(0.0) is None and there.says(0.0) is None
    assert all(here.says(look * 100 * LOOK_SECONDS) is None for look in range(1, SILENCE))


@pytest.mark.parametrize("left", ["", "it closed its engine"])
def test_a_rank_that_nobody_misses_may_be_silent(left: str) -> None:
    here, there = world(2)
    here.issues()
    there.issues()
    there.says(0.0)
    there.line.post(left=left, count=1)
    here.waits(0.0)
    assert all(here.says(look * LOOK_SECONDS) is None for look in range(5 * SILENCE))


@pytest.mark.parametrize("issued", [0, 1])
def test_a_rank_whose_process_is_stopped_is_late_at_once(issued: int) -> None:
    """It does not matter whether it has come: one that was stopped in the middle of a collective may not go on."""
    here, there = world(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = own().replace(f" {os.getpid()}", f" {child.pid}")
        here.issues()
        there.issues(issued)
        there.line.post(process=process)
        there.says(0.0)
        here.says(0.0)
        here.waits(0.0)
        child.send_signal(signal.SIGSTOP)
        while not is_stopped(process):
            time.sleep(0.01)
        assert all(here.says(now) is None for now in times(0.0, DEADLINE))
        found = [said for now in times(DEADLINE + 1.0, DEADLINE + 3.0) if (said := here.says(now)) is not None]
        assert f"rank 1 (before its first call, after {issued} collectives, its process is stopped)" in found[0]
        child.kill()
