"""The record of a window: its events, and what of them is only supposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zeroweave.schedule import Event


class _Supposed(NamedTuple):
    """A call of the record, from `entered` to `left`, that belongs there only if some rank has `needed` its buckets."""

    entered: int
    left: int
    needed: bool


class Record:
    """Events in the order in which they happened. Its length is their number."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._supposed: list[_Supposed] = []

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def add(self, event: Event) -> int:
        """One more event; returns its place."""
        self._events.append(event)
        return len(self._events) - 1

    def suppose(self, entered: int, left: int, needed: bool) -> None:
        """The call between these places belongs there only if some rank may have needed it; has this one?"""
        self._supposed.append(_Supposed(entered, left, needed))

    def needed(self) -> bytes:
        """A byte for each supposed call, in order: 1 where this rank may have needed it."""
        return bytes(each.needed for each in sorted(self._supposed))

    def prune(self, needed: bytes) -> None:
        """Drops the supposed calls that no rank has needed; `needed` says it for all ranks."""
        unneeded = [each for each, some in zip(sorted(self._supposed), needed, strict=True) if not some]
        dropped = {index for each in unneeded for index in (each.entered, each.left)}
        self._events = [event for index, event in enumerate(self._events) if index not in dropped]
        self._supposed.clear()

    def clear(self) -> None:
        self._events.clear()
        self._supposed.clear()
