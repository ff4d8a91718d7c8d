"""Does rank 0 answer? Where its process is stopped, or its machine out of reach, whoever asks it waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from zeroweave.ranks.board import Board
from zeroweave.ranks.start import BACKSTOP_SECONDS
from zeroweave.ranks.watcher import LOOK_SECONDS, end_process

_LOOKS = 3
"""Looks that have to find the same. A job that was suspended as a whole and goes on has an answer before."""


class Answers:
    """Ends this process where rank 0 has not answered for longer than the deadline.

    It asks nobody itself. `missed()`: since when (`time.monotonic`) this process has waited for an answer that it needs
    to go on, if it does. `where()` ends the message. `grace`: seconds that it waits behind the deadline.
    """

    def __init__(
        self,
        rank: int,
        missed: Callable[[], float | None],
        end: Callable[[str], None],
        deadline_seconds: float,
        where: Callable[[], str] = str,
        grace: float = 0.0,
    ) -> None:
        self._rank, self._missed, self._end, self._where = rank, missed, end, where
        self._deadline, self._grace = deadline_seconds, grace
        self._since: float | None = None
        self._looks = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            found = self.look(time.monotonic())
            if found is not None and not stop.is_set():
                self._end(f"rank {self._rank} is ended by its alarm: {found}{self._where()}")
                return

    def look(self, now: float) -> str | None:
        """Why this process must end, or None."""
        since = self._missed()
        self._looks = self._looks + 1 if since is not None and since == self._since else 0
        self._since = since
        if since is None or now - since <= self._deadline + self._grace or self._looks < _LOOKS:
            return None
        return f"rank 0, whose process keeps the board, has not answered within the deadline of {self._deadline:g} s"


@contextmanager
def answered(
    rank: int, deadline_seconds: float, grace: float = 0.0, end: Callable[[str], None] = end_process
) -> Iterator[None]:
    """Ends this process where what is inside does not come to its end: for calls that no alarm watches.

    `grace`: seconds behind the deadline, for what has a timeout of its own, which comes first where rank 0 answers.
    """
    begin, stop = time.monotonic(), threading.Event()
    answers = Answers(rank, lambda: begin, end, deadline_seconds, grace=grace)
    thread = threading.Thread(target=answers.run, args=(stop,), name="zeroweave answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def rendezvous(board: Board, name: str, deadline_seconds: float) -> Iterator[Store]:
    """A store inside the board, in which all ranks find each other for a new process group."""
    # Behind the group's own timeout, which is that of the backstop at most.
    with answered(board.rank, deadline_seconds, 2 * BACKSTOP_SECONDS):
        yield board.part(name)
