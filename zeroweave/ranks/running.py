"""Time in which this process ran: a deadline does not count what a stopped or suspended one has missed."""

from __future__ import annotations

import time
from typing import Final

_APART: Final = 3.0
"""Seconds between two looks that are too many for a process that runs."""


class RunningClock:
    """Counts as `time.monotonic` does, without the gaps. Whoever waits by it looks at it each second, or more often."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._gaps: list[tuple[float, float]] = []
        """when each ended, and how long it was"""

    def look(self) -> float:
        """The time now."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > _APART:
            self._gaps.append((self._looked, self._looked - before))
        return self.at(self._looked)

    def at(self, moment: float) -> float:
        """A moment of `time.monotonic` by this clock."""
        return moment - sum(gap for end, gap in self._gaps if end <= moment)
