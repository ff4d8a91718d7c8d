"""When a rank that rank 0 does not answer must end, with a pretended clock."""

from __future__ import annotations

import torch.distributed as dist

from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.answers import Answers
from zeroweave.ranks.board import Board
from zeroweave.ranks.status import StatusLine
from zeroweave.ranks.watcher import Watcher

DEADLINE = 20.0


class Asking(Watcher):
    """Rank 1's watcher, which has asked rank 0 at a time."""

    def asks(self, now: float | None) -> None:
        self.asked = now


class Rank:
    def __init__(self) -> None:
        store = dist.HashStore()
        line, ledger = StatusLine(Board(1, 2, lambda: store)), Ledger(2, 1)
        self.since: float | None = None
        self.watcher = Asking(line, lambda: (0, 0), lambda _: None, ledger, DEADLINE, lambda: 0)
        self.answers = Answers(self.watcher, lambda: self.since, lambda _: None, DEADLINE)

    def ends(self, first: float, last: float) -> float | None:
        """When it looks each second between two times, the first at which it must end."""
        seconds = range(int(last - first) + 1)
        return next((first + more for more in seconds if self.answers.look(first + more) is not None), None)


def test_who_waits_without_an_answer_ends_after_the_deadline() -> None:
    rank = Rank()
    rank.since = 5.0
    rank.watcher.asks(6.0)
    assert rank.ends(0.0, 6.0 + DEADLINE) is None
    assert rank.ends(7.0 + DEADLINE, 9.0 + DEADLINE) == 7.0 + DEADLINE


def test_who_computes_needs_no_answer() -> None:
    rank = Rank()
    rank.watcher.asks(6.0)
    assert rank.ends(6.0, 20 * DEADLINE) is None
    rank.since = 20 * DEADLINE  # it begins to wait, and waits for as long as it may
    assert rank.ends(20 * DEADLINE, 21 * DEADLINE) is None


def test_with_an_answer_in_time_all_is_well() -> None:
    rank = Rank()
    rank.since = 0.0
    for now in range(20 * int(DEADLINE)):
        rank.watcher.asks(float(now - now % (int(DEADLINE) - 1)))
        assert rank.answers.look(float(now)) is None


def test_a_job_that_was_suspended_as_a_whole_goes_on() -> None:
    rank = Rank()
    rank.since = 0.0
    rank.watcher.asks(0.5)
    assert rank.answers.look(1.0) is None
    for now in (1000.0, 1001.0):
        assert rank.answers.look(now) is None
    rank.watcher.asks(None)  # the answer
    assert rank.ends(1002.0, 1010.0) is None
