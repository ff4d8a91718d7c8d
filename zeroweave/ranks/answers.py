"""Does rank 0 answer? Where its process is stopped, or its machine out of reach, whoever asks it waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from zeroweave.ranks.board import Board
from zeroweave.ranks.running import RunningClock
from zeroweave.ranks.start import BACKSTOP_SECONDS
from zeroweave.ranks.watcher import LOOK_SECONDS, end_process

_LOOKS = 3
"""Looks that have to find the same, each at most so many times `LOOK_SECONDS` behind the one before.

A job that was suspended as a whole and goes on has an answer before.
"""


NO_ANSWER = "rank 0, whose process keeps the board, has not answered"


class Answers:
    """Ends this process where rank 0 has not answered for longer than the deadline.

    It asks nobody itself. `waiting_since()`: when (`time.monotonic`) this process began to wait for an answer that it
    needs to go on, if it waits. `grace`: seconds that it waits behind the deadline. The message says `what` has not
    happened until then, and ends with `where()`.
    """

    def __init__(
        self,
        rank: int,
        waiting_since: Callable[[], float | None],
        end: Callable[[str], None],
        deadline_seconds: float,
        where: Callable[[], str] = str,
        grace: float = 0.0,
        what: str = NO_ANSWER,
    ) -> None:
        self._rank, self._waiting_since, self._end, self._where = rank, waiting_since, end, where
        self._deadline, self._grace, self._what = deadline_seconds, grace, what
        self._clock = RunningClock()
        self._since: float | None = None
        self._looks, self._looked = 0, float("-inf")

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            found = self.look(self._clock.look())
            if found is not None and not stop.is_set():
                self._end(f"rank {self._rank} is ended by its alarm: {found}{self._where()}")
                return

    def look(self, now: float) -> str | None:
        """Why this process must end, or None."""
        since = self._waiting_since()
        same = since is not None and since == self._since and now - self._looked <= _LOOKS * LOOK_SECONDS
        self._looks = self._looks + 1 if same else 0
        self._since, self._looked = since, now
        if since is None or now - self._clock.at(since) <= self._deadline + self._grace or self._looks < _LOOKS:
            return None
        return f"{self._what} within the deadline of {self._deadline:g} s"


@contextmanager
def answered(
    rank: int,
    deadline_seconds: float,
    end: Callable[[str], None] = end_process,
    since: float | None = None,
    grace: float = 0.0,
    what: str = NO_ANSWER,
) -> Iterator[None]:
    """Ends this process where what is inside does not come to its end: for calls that no alarm watches.

    `since`: from when the deadline counts, None: from now. `grace`, `what`: see `Answers`; the former is for what has a
    timeout of its own, which comes first where rank 0 answers.
    """
    begin, stop = time.monotonic() if since is None else since, threading.Event()
    answers = Answers(rank, lambda: begin, end, deadline_seconds, grace=grace, what=what)
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
    what = f"the ranks have not found each other for '{name}'"
    with answered(board.rank, deadline_seconds, grace=2 * BACKSTOP_SECONDS, what=what):
        yield board.part(name)
