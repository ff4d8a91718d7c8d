"""What is known of windows: those that were captured, those that must not be, and how often they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from zeroweave.engine.agreements import Course
from zeroweave.engine.graphs.parts import CapturedWindow
from zeroweave.notices import Journal
from zeroweave.schedule import Schedule

_WINDOWS: Final = 8
"""So many windows, of other shapes, are captured at most; others run as ever."""
_OFTEN: Final = 2
"""A window is captured when windows that begin like it have come so often."""
_REMEMBERED: Final = 1024
"""So many first calls are counted."""
_ATTEMPTS: Final = 3
"""So many trials of windows that begin alike may come to nothing."""


class Known:
    """The windows of one engine, by the key of their first call. `lasting`: why none can ever be captured."""

    def __init__(self, lasting: str | None, journal: Journal) -> None:
        self.windows: list[CapturedWindow] = []
        self.captured = 0
        """so far, with those that are gone"""
        self.uncaptured: Counter[str] = Counter()
        """why calls ran as ever that might have been replayed, and how many"""
        self._lasting, self._journal = lasting, journal
        self._seen: Counter[object] = Counter()
        self._attempts: Counter[object] = Counter()
        self._gone: Counter[object] = Counter()
        """how often windows had to go since one that begins so was replayed"""
        self._refused: dict[object, str] = {}

    def find(self, key: object, schedule: Schedule | None) -> tuple[CapturedWindow | None, Course, str]:
        """The window that begins with this call and follows `schedule`, if there is one; else what may be done.

        Windows whose graphs would look for things that are not there any more go.
        """
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        self._seen[key] += 1
        there = [each for each in self.windows if each.whereabouts.hold()]
        if len(there) < len(self.windows):
            self.windows = there
            self._gone[key] += 1
        for window in reversed(self.windows):
            if window.schedule is schedule and window.parts[0].key == key:
                self._gone.pop(key, None)
                return window, Course.REPLAY, ""
        if self._gone[key] >= _ATTEMPTS and key not in self._refused:
            self.refuse(key, "what its graphs read, or the optimizer's options, change with each step")
        if key in self._refused:
            return None, Course.PLAIN, self._refused[key]
        if sum(each.schedule is schedule for each in self.windows) >= _WINDOWS:
            return None, Course.PLAIN, f"{_WINDOWS} windows of other shapes are captured, and no more"
        if self._seen[key] <= _OFTEN:
            return None, Course.PLAIN, "windows like it are rare so far"
        return None, Course.TRIAL, ""

    def add(self, window: CapturedWindow) -> None:
        """In the place of one that is alike, and, where there are too many, of the oldest of another schedule."""
        new = window.schedule, window.parts[0].key
        kept = [each for each in self.windows if (each.schedule, each.parts[0].key) != new]
        if len(kept) >= _WINDOWS:
            oldest = next((each for each in kept if each.schedule is not window.schedule), kept[0])
            kept.remove(oldest)
        self.windows = [*kept, window]
        self.captured += 1

    def clear(self) -> None:
        self.windows = []

    def spoilt(self, key: object, why: str) -> None:
        """A trial of a window that begins so has come to nothing."""
        self._attempts[key] += 1
        if self._attempts[key] == _ATTEMPTS:
            self.refuse(key, why)

    def refuse(self, key: object, why: str) -> None:
        """Windows that begin so are not captured."""
        self._refused[key] = why
        self.tell(why)

    def tell(self, why: str) -> None:
        """A call runs as ever. Lasting reasons are told once."""
        if why not in self.uncaptured:
            lasting = why in {self._lasting, *self._refused.values()}
            told = self._journal.warn if lasting else self._journal.tell
            told("fallback", f"compile.cuda_graphs: steps run without graphs, exact but slower: {why}")
        self.uncaptured[why] += 1


def fits(window: CapturedWindow | None, at: int, key: object) -> bool:
    """Is this the key of the window's call number `at`?"""
    parts: Sequence[object] = () if window is None else window.parts
    return window is not None and at < len(parts) and window.parts[at].key == key
