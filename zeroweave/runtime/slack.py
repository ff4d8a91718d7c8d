"""Slack: how far memory in use, as calls begin, is below what may be in use. States may travel in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Final

_SHARE: Final = 0.85
"""Of the device's memory: states on their way leave the rest to what calls need inside."""


class Slack:
    """Counts memory in use as calls begin. What a call allocates inside is not counted, and can raise a step's peak.

    `in_use()`: bytes of device memory; always 0 where they are not counted. `capacity()`: so many there can be.
    `states`: those bytes in use that states on their way take. `fills`: states may take what no step has needed;
    otherwise no more is in use with them than has been without.
    """

    def __init__(self, in_use: Callable[[], int], capacity: Callable[[], int], fills: bool = False) -> None:
        self._in_use, self._capacity, self._fills = in_use, capacity, fills
        self._most = self._limit = 0
        """in use at most as a call began, states on their way aside; and what they may not exceed"""
        self._course: list[int] = []
        """what was in use, states aside, at each call of this backward so far"""
        self._needed: list[int] = []
        """what the last whole backward had in use from each of its calls on, at most"""
        self._in_backward = False
        self.states = 0

    def begin_backward(self) -> None:
        """A backward begins in which states may come. The capacity is asked for, which other processes may change."""
        self._limit = int(_SHARE * self._capacity())
        self._course, self._in_backward = [], True

    def end_backward(self, whole: bool) -> None:
        """It is over. `whole`: it has come to its end, so the next one is expected to take as much."""
        if self._in_backward and whole:
            self.call_begins()
            self._needed = list(accumulate(reversed(self._course), max))[::-1]
        self._in_backward = False

    def call_begins(self) -> None:
        now = self._in_use() - self.states
        self._most = max(self._most, now)
        if self._in_backward:
            self._course.append(now)

    def add(self, nbytes: int) -> None:
        """So many bytes of states have come to the device, or, if negative, have been freed."""
        self.states += nbytes

    @property
    def _allowed(self) -> int:
        """Bytes that may be in use with states."""
        return self._limit if self._fills else min(self._most, self._limit)

    @property
    def room(self) -> int:
        """Bytes that further states may take now. At most 0 where memory is not counted."""
        return self._allowed - self._in_use()

    @property
    def lasting_room(self) -> int:
        """Bytes that further states may take to the end of the backward, if it takes what the last whole one has taken.

        0 for calls that that one has not had.
        """
        call = len(self._course) - 1
        if not 0 <= call < len(self._needed):
            return 0
        return min(self.room, self._allowed - self.states - self._needed[call])
