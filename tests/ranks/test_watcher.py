"""When a watcher ends its process, rule by rule, with a board in one process and a pretended clock."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from zeroweave.comm.ledger import Ledger
from zeroweave.ranks.board import Board
from zeroweave.ranks.status import Failure, RankStatus, StatusLine, question_of
from zeroweave.ranks.watcher import ALIKE_SECONDS, LOST_SECONDS, POLL_SECONDS, Watcher

DEADLINE = 20.0


class Rank:
    """A rank of a pretended world: its line, its watcher and how far it is."""

    def __init__(self, board: Board) -> None:
        self.board, self.line = board, StatusLine(board)
        self.at, self.operations = (0, 0), 0
        self.ends: list[str] = []
        self.ledger = Ledger(board.world, board.rank)
        self.begun: dict[str, int] = {}
        self.watcher = Watcher(
            self.line,
            lambda: self.at,
            self.ends.append,
            self.ledger,
            DEADLINE,
            lambda: self.operations,
            lambda: self.begun,
        )

    def says(self, now: float) -> str | None:
        return self.watcher.look(now) or self.watcher.find(now)


def world(ranks: int) -> list[Rank]:
    store = dist.HashStore()
    boards = [Board(rank, ranks, lambda: store) for rank in range(ranks)]
    return [Rank(board) for board in boards]


def failure(**changes: object) -> Failure:
    fields: dict[str, object] = {
        "epoch": 0,
        "step": 3,
        "place": "forward",
        "count": 5,
        "error": "ValueError: no",
    }
    return Failure(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.oldest
def test_a_status_survives_the_board() -> None:
    error = failure(error='a "quoted"\nline', final=True)
    status = RankStatus(beat=4, step=2, count=9, left="it closed", failure=error)
    assert RankStatus.parse(status.dump()) == status
    assert RankStatus.parse("") == RankStatus()


@pytest.mark.oldest
def test_a_failure_ends_in_the_end_who_neither_fails_alike_nor_goes_on() -> None:
    failing, waiting = world(2)
    waiting.at = (3, 5)
    assert waiting.says(0.0) is None
    failing.line.post(failure=failure())
    failing.board.ring()
    assert waiting.says(0.1) is None
    assert waiting.says(0.1 + DEADLINE - 0.05) is None, "a slow rank may yet fail alike"
    assert waiting.says(0.1 + DEADLINE) == "rank 0 failed in forward at step 3: ValueError: no"
    assert failing.says(99.0) is None, "a failing rank raises, it is not ended"
    assert failing.board.decided(question_of(failure())) == "alone"


@pytest.mark.parametrize(
    ("ours", "patience"),
    [
        ({"0": 8, "mine": 3}, ALIKE_SECONDS),
        ({"0": 7, "mine": 3}, DEADLINE),
        ({"0": 5, "mine": 3}, DEADLINE),
        ({"mine": 9}, DEADLINE),
    ],
)
def test_a_failure_ends_who_waits_for_it_in_a_collective_of_the_programs_own(
    ours: dict[str, int], patience: float
) -> None:
    """Which the failed rank has not begun. In groups that it is not in, others may do what they like."""
    failing, waiting = world(2)
    waiting.at, waiting.begun = (3, 5), ours
    failing.line.post(failure=failure(others={"0": 7, "theirs": 1}))
    assert waiting.says(0.0) is None and waiting.says(patience - 0.05) is None
    assert waiting.says(patience) == "rank 0 failed in forward at step 3: ValueError: no"


@pytest.mark.parametrize(("at", "operations"), [((3, 6), 0), ((3, 5), 1)])
def test_a_failure_ends_at_once_who_has_gone_on(at: tuple[int, int], operations: int) -> None:
    """It has begun a collective, or an agreement, that the failed rank will never come to."""
    failing, waiting = world(2)
    waiting.at = (3, 5)
    failing.line.post(failure=failure())
    assert waiting.says(0.0) is None
    waiting.at, waiting.operations = at, operations
    assert waiting.says(0.1) == "rank 0 failed in forward at step 3: ValueError: no"
    assert failing.board.decided(question_of(failure())) == "alone"


def test_no_waiting_where_it_is_certain() -> None:
    for change in ({"failure": failure(final=True)}, {"failure": failure(), "left": "it closed its engine"}):
        failing, waiting = world(2)
        failing.line.post(**change)
        assert "rank 0 failed" in (waiting.says(0.0) or "")
    failing, waiting = world(2)
    failing.line.post(failure=failure())
    failing.board.decide(question_of(failure()), "different")
    assert "rank 0 failed" in (waiting.says(0.0) or "")


def test_the_cause_is_told_beside_what_followed_from_it() -> None:
    waiting, broken, failing = world(3)
    failing.line.post(failure=failure())
    broken.line.post(failure=failure(error="RuntimeError: connection closed", final=True))
    assert waiting.says(0.0) == (
        "rank 1 failed in forward at step 3: RuntimeError: connection closed; "
        "rank 2 failed in forward at step 3: ValueError: no"
    )


def test_a_rank_that_fails_alike_is_not_ended() -> None:
    first, second = world(2)
    first.line.post(failure=failure())
    assert second.says(0.0) is None
    second.line.post(failure=failure())
    assert second.says(60.0) is None
    for rank in (first, second):
        rank.board.decide(question_of(failure()), "alike")
        rank.line.epoch = 1
    assert first.says(120.0) is None and second.says(120.0) is None
    first.line.post(failure=failure(epoch=1))
    assert second.says(121.0) is None
    assert "rank 0 failed" in (second.says(121.0 + DEADLINE) or "")


@pytest.mark.oldest
def test_a_rank_stuck_in_a_collective_is_ended() -> None:
    first, second = world(2)
    first.line.finish(4, 20)
    second.at = (4, 20)
    assert second.says(0.0) is None, "it may yet reach the agreement"
    second.at = (4, 21)
    text = second.says(0.1) or ""
    assert "rank 0 finished step 4 with 20 collectives" in text and "issued 21" in text
    second.line.finish(4, 21)
    assert second.says(0.2) is None, "it has reached the agreement, which compares the counts"


def test_a_run_that_goes_back_to_an_earlier_step_waits_for_nobody() -> None:
    """As `load` does. What a rank has told of the steps before is news to nobody then, whenever it is read."""
    first, second = world(2)
    for step in (3, 4):
        first.line.finish(step, 10 + step)
        second.line.finish(step, 10 + step)
    second.line.finish(2, 20)
    second.at = (3, 25)
    assert second.says(0.0) is None, "the other may be there, and has not told yet"
    first.line.finish(2, 20)
    first.line.finish(3, 22)
    assert "rank 0 finished step 3 with 22 collectives" in (second.says(2.0) or "")


def test_a_rank_that_left_is_missed_only_in_a_collective() -> None:
    first, second = world(2)
    first.line.post(count=20, left="it closed its engine")
    second.at = (5, 20)
    assert second.says(0.0) is None
    second.at = (5, 21)
    assert "rank 0 issues no collective after its 20: it closed its engine" in (second.says(0.1) or "")


def test_a_lost_board() -> None:
    for left, text in (("", "the process of rank 0 has gone without a word"), ("it closed its engine", None)):
        first, second = world(2)
        first.line.post(left=left)
        assert second.says(0.0) is None
        second.board.close()
        assert second.says(1.0) is None
        assert second.says(1.0 + LOST_SECONDS + 0.1) == text


def test_the_thread_ends_the_process_once_and_tells() -> None:
    failing, waiting = world(2)
    failing.line.post(failure=failure(final=True))
    thread = threading.Thread(target=waiting.watcher.run, args=(threading.Event(),))
    thread.start()
    thread.join(POLL_SECONDS + 2.0)
    assert waiting.ends == ["rank 1 is ended by its alarm: rank 0 failed in forward at step 3: ValueError: no"]
    assert waiting.line.status.left and waiting.line.status.failure is None


def test_what_a_watcher_found_is_news() -> None:
    first, second, third = world(3)
    first.line.finish(4, 20)
    second.at = (4, 21)
    thread = threading.Thread(target=second.watcher.run, args=(threading.Event(),))
    thread.start()
    thread.join(POLL_SECONDS + 2.0)
    assert len(second.ends) == 1
    assert "rank 1 failed in its alarm at step 4: rank 0 finished step 4" in (third.says(0.0) or "")
