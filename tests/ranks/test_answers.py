"""When a rank that rank 0 does not answer must end, with a pretended clock."""

from __future__ import annotations

import threading

import pytest

from zeroweave.ranks import answers
from zeroweave.ranks.answers import Answers, answered

DEADLINE = 20.0


class Rank:
    """Rank 1, which misses an answer since some time."""

    def __init__(self, grace: float = 0.0) -> None:
        self.since: float | None = None
        self.answers = Answers(1, lambda: self.since, lambda _: None, DEADLINE, grace=grace)

    def ends(self, first: float, last: float) -> float | None:
        """When it looks each second between two times, the first at which it must end."""
        seconds = range(int(last - first) + 1)
        return next((first + more for more in seconds if self.answers.look(first + more) is not None), None)


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_who_waits_without_an_answer_ends_after_the_deadline(grace: float) -> None:
    rank, late = Rank(grace), 6.0 + DEADLINE + grace
    rank.since = 6.0
    assert rank.ends(0.0, late) is None
    assert rank.ends(late + 1.0, late + 3.0) == late + 1.0


def test_who_computes_needs_no_answer() -> None:
    rank = Rank()
    assert rank.ends(6.0, 20 * DEADLINE) is None
    rank.since = 20 * DEADLINE  # it begins to wait, and waits for as long as it may
    assert rank.ends(20 * DEADLINE, 21 * DEADLINE) is None


def test_with_an_answer_in_time_all_is_well() -> None:
    rank = Rank()
    for now in range(20 * int(DEADLINE)):
        rank.since = float(now - now % (int(DEADLINE) - 1))
        assert rank.answers.look(float(now)) is None


def test_a_job_that_was_suspended_as_a_whole_goes_on() -> None:
    rank = Rank()
    rank.since = 0.5
    assert rank.answers.look(1.0) is None
    for now in (1000.0, 1001.0):
        assert rank.answers.look(now) is None
    rank.since = None  # the answer
    assert rank.ends(1002.0, 1010.0) is None


def test_what_was_seen_before_a_job_was_suspended_does_not_count() -> None:
    rank = Rank()
    rank.since = 0.5
    assert rank.ends(1.0, 10.0) is None
    for now in (1000.0, 1001.0, 1002.0):
        assert rank.answers.look(now) is None
    assert rank.answers.look(1003.0) is not None


def test_what_takes_too_long_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LOOK_SECONDS", 0.1)
    said: list[str] = []
    ended = threading.Event()
    with answered(1, 0.1, lambda reason: (said.append(reason), ended.set()), grace=0.1):  # type: ignore[func-returns-value]
        assert ended.wait(60.0)
    assert said == [
        "rank 1 is ended by its alarm: rank 0, whose process keeps the board, has not answered within the deadline of "
        "0.1 s"
    ]


def test_what_comes_to_its_end_leaves_no_thread() -> None:
    before = threading.active_count()
    with answered(1, DEADLINE):
        assert threading.active_count() == before + 1
    with pytest.raises(ValueError, match="inside"), answered(1, DEADLINE):
        raise ValueError("inside")
    assert threading.active_count() == before
