"""Does rank 0 answer? Where its process is stopped, or its machine out of reach, whoever asks it waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zeroweave.ranks import stacks
from zeroweave.ranks.watcher import LOOK_SECONDS, Watcher

_LOOKS = 3
"""Looks that have to find the same. A job that was suspended as a whole and goes on has an answer before."""


class Answers:
    """Ends this process where it has waited for longer than the deadline and so has the watcher, for an answer.

    It asks nobody itself. `waiting()`: since when this process has waited for others, if it does.
    """

    def __init__(
        self,
        watcher: Watcher,
        waiting: Callable[[], float | None],
        end: Callable[[str], None],
        deadline_seconds: float,
    ) -> None:
        self._watcher, self._waiting, self._end, self._deadline = watcher, waiting, end, deadline_seconds
        self._asked: float | None = None
        self._looks = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            found = self.look(time.monotonic())
            if found is not None and not stop.is_set():
                where = stacks.write(self._watcher.stacks, self._watcher.rank)
                self._end(f"rank {self._watcher.rank} is ended by its alarm: {found}{where}")
                return

    def look(self, now: float) -> str | None:
        """Why this process must end, or None."""
        asked, since = self._watcher.asked, self._waiting()
        self._looks = self._looks + 1 if asked is not None and asked == self._asked else 0
        self._asked = asked
        if asked is None or since is None or now - max(asked, since) <= self._deadline or self._looks < _LOOKS:
            return None
        return f"rank 0, whose process keeps the board, has not answered within the deadline of {self._deadline:g} s"
