"""Lists that all ranks must hold alike, compared over a board by threads that stand in for the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zeroweave.errors import AgreementError
from zeroweave.ranks.board import Board
from zeroweave.ranks.compare import compare, difference

DEADLINE = 60.0


def on_ranks(*works: Callable[[Board], None]) -> list[str]:
    """What each rank's error says, "" where it has none."""
    store = dist.HashStore()

    def run(rank: int) -> str:
        try:
            works[rank](Board(rank, len(works), lambda: store))
        except AgreementError as error:
            return str(error)
        return ""

    for rank in range(len(works)):
        Board(rank, len(works), lambda: store)
    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, range(len(works))))


def once(lines: Sequence[str], number: int = 1, deadline: float = DEADLINE) -> Callable[[Board], None]:
    return lambda board: compare(board, number, hash(tuple(lines)) % 2**64, lambda: lines, deadline)


def test_equal_lists() -> None:
    assert on_ranks(once(["a", "b"]), once(["a", "b"]), once(["a", "b"])) == ["", "", ""]
    compare(None, 1, 7, list, DEADLINE)


def test_all_ranks_hear_of_the_first_difference() -> None:
    said = on_ranks(once(["a", "b"]), once(["a", "b"]), once(["a", "c", "d"]))
    assert said == ["[ZW501] the ranks made different schedules: at 1, rank 0 has 'b' and rank 2 has 'c'"] * 3


def test_a_list_that_goes_on() -> None:
    assert difference(["a"], ["a", "b"], 0, 3) == "at 1, rank 0 has 'nothing more' and rank 3 has 'b'"
    assert difference(["a"], ["a"], 0, 3) == "ranks 0 and 3 describe them alike"


def test_a_rank_that_does_not_come_is_named() -> None:
    said = on_ranks(once(["a"], deadline=0.3), lambda board: None)
    assert said == ["[ZW502] rank 1 did not come to change 1 of the schedule within the deadline of 0.3 s", ""]


def test_a_rank_may_be_one_comparison_ahead() -> None:
    """Rank 1 reads what rank 0 has posted only when that has begun the next comparison, of another list."""
    ahead = threading.Event()

    class Fast(Board):
        def post(self, heading: str, text: str) -> None:
            super().post(heading, text)
            if text.startswith("2\t"):
                ahead.set()

    class Slow(Board):
        def read(self, heading: str) -> list[str]:
            assert ahead.wait(DEADLINE)
            return super().read(heading)

    def twice(kind: type[Board]) -> Callable[[Board], None]:
        def work(board: Board) -> None:
            own = kind(board.rank, board.world, board._reach)
            once(["a"], 1)(own)
            once(["b"], 2)(own)

        return work

    assert on_ranks(twice(Fast), twice(Slow)) == ["", ""]


@pytest.mark.parametrize("rounds", [30])
def test_one_comparison_after_another(rounds: int) -> None:
    def work(board: Board) -> None:
        for number in range(1, rounds + 1):
            once([str(number)], number)(board)

    assert on_ranks(work, work, work) == ["", "", ""]
