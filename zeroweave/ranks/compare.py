"""Do all ranks hold the same list? Asked over the store: a rank that does not answer must hold up no collective.

What travels is 64 bits per rank; only where they differ do the lists, so that the error can say where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from zeroweave.errors import AgreementError
from zeroweave.ranks.board import Board

_POLL_SECONDS = 5e-4


class RankMissed(AgreementError):
    """A rank did not come to a comparison before the deadline."""


def compare(
    board: Board | None, number: int, digest: int, lines: Callable[[], Sequence[str]], deadline_seconds: float
) -> None:
    """Returns when every rank has come here with the same `digest`; AgreementError on all ranks otherwise.

    `number` counts the comparisons of this board from 1, `lines()` is the list in words. `RankMissed` names a rank that
    does not come within the deadline. None: a world of 1.
    """
    if board is None:
        return
    # Two headings in turn: a rank that has seen the others' digests may begin the next comparison before they have
    # seen its own, but not the one after that.
    digests = _exchange(board, f"digest {number % 2}", number, f"{digest:016x}", deadline_seconds)
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, each in enumerate(digests) if each != digests[0])
    found = first_difference(board, number, lines(), other, deadline_seconds)
    raise AgreementError(f"the ranks made different schedules: {found}")


def first_difference(board: Board, number: int, lines: Sequence[str], other: int, deadline_seconds: float) -> str:
    """Where the lists of rank 0 and of rank `other` begin to differ, in words. Collective; `number` as in `compare`."""
    lists = _exchange(board, "lines", number, "\n".join(lines), deadline_seconds)
    return difference(lists[0].split("\n"), lists[other].split("\n"), 0, other)


def difference(one: Sequence[str], two: Sequence[str], rank: int, other: int) -> str:
    """Where two ranks' lists begin to differ, in words."""
    for index, (mine, theirs) in enumerate(zip_longest(one, two, fillvalue="nothing more")):
        if mine != theirs:
            return f"at {index}, rank {rank} has '{mine}' and rank {other} has '{theirs}'"
    return f"ranks {rank} and {other} describe them alike"


def _exchange(board: Board, heading: str, number: int, text: str, deadline_seconds: float) -> list[str]:
    end = time.monotonic() + deadline_seconds
    board.post(heading, f"{number}\t{text}")
    while True:
        lines = [line.partition("\t") for line in board.read(heading)]
        missing = [rank for rank, (count, _, _) in enumerate(lines) if int(count or 0) < number]
        if not missing:
            return [rest for _, _, rest in lines]
        if time.monotonic() > end:
            who = ", ".join(f"rank {rank}" for rank in missing)
            raise RankMissed(
                f"[ZW502] {who} did not come to change {number} of the schedule within the deadline of "
                f"{deadline_seconds:g} s"
            )
        time.sleep(_POLL_SECONDS)
