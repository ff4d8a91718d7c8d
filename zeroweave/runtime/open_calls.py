"""The calls of one window that the program has entered and not left."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from zeroweave.schedule.instructions import Call


class OpenCall(NamedTuple):
    call: Call
    uses: tuple[int, ...]
    lasts: bool
    """True if the schedule has an `End` for it"""
    entered: int
    """its index in the record"""
    supposed: bool | None


class OpenCalls:
    """In the order in which they were entered; they may overlap."""

    def __init__(self) -> None:
        self._open: list[OpenCall] = []
        self._numbers: dict[Call, int] = {}
        """the number of each call that was entered last among its equals"""
        self.outlasted = 0
        """open calls that are over by the schedule: later instructions may drop what they still read"""

    def enter(self, opened: OpenCall) -> int:
        """One more; returns its number among equal calls."""
        self._open.append(opened)
        self.outlasted += not opened.lasts
        number = self._numbers[opened.call] = self._numbers.get(opened.call, -1) + 1
        return number

    def last(self, call: Call) -> OpenCall:
        """Of equal calls, the one that was entered last."""
        return next(each for each in reversed(self._open) if each.call == call)

    def leave(self, ended: OpenCall) -> None:
        """It is over."""
        self._open.remove(ended)
        self.outlasted -= not ended.lasts

    def uses(self) -> Counter[int]:
        """How many of them need each bucket's values."""
        return Counter(bucket for each in self._open for bucket in each.uses)

    def is_used(self, bucket: int) -> bool:
        """True if one of them needs the bucket's values."""
        return any(bucket in each.uses for each in self._open)

    def lasts(self, call: Call) -> bool:
        """True if the schedule has an `End` for an open call that equals this one."""
        return any(each.lasts for each in self._open if each.call == call)

    def clear(self) -> None:
        """Closes all of them."""
        self._open.clear()
        self.outlasted = 0
