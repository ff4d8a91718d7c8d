"""Slack: how far memory in use is now below the most that was in use as a call began. States may travel in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_SHARE: Final = 0.85
"""Of the device's memory: states on their way leave the rest to what calls need inside."""


class Slack:
    """Counts memory in use as calls begin. What a call allocates inside is not counted, and can raise a step's peak.

    `in_use()`: bytes of
    device memory; always 0 where they are not counted. `capacity()`: so many there can be. `states`: those bytes in use
    that states on their way take.
    """

    def __init__(self, in_use: Callable[[], int], capacity: Callable[[], int]) -> None:
        self._in_use, self._capacity = in_use, capacity
        self._most = self._limit = 0
        """in use at most as a call began, states on their way aside; and what they may not exceed"""
        self.states = 0

    @property
    def counts(self) -> bool:
        """True once memory in use has been counted."""
        return self._most > 0

    def measure(self) -> None:
        """Asks for the capacity, which other processes may have changed. It takes a while: once a step is enough."""
        self._limit = int(_SHARE * self._capacity())

    def call_begins(self) -> None:
        self._most = max(self._most, self._in_use() - self.states)

    def add(self, nbytes: int) -> None:
        """So many bytes of states have come to the device, or, if negative, have been freed."""
        self.states += nbytes

    @property
    def room(self) -> int:
        """Bytes that further states may take. At most 0 where memory is not counted."""
        return min(self._most, self._limit) - self._in_use()
