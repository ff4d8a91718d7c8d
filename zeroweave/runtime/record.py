"""The record of a window: its events, and what of them is only supposed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zeroweave.schedule import Entered, Event


class _Supposed(NamedTuple):
    """A call of the record, from `entered` to `left`, that may need fewer buckets than it says: those `asked` for."""

    entered: int
    left: int
    asked: set[int]


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

    def suppose(self, entered: int, left: int, asked: set[int]) -> None:
        """Of the buckets of the call between these places, this rank has needed those in `asked` only."""
        self._supposed.append(_Supposed(entered, left, asked))

    def asked(self) -> bytes:
        """For each bucket of each supposed call, in order: has this rank needed its values?"""
        return bytes(bucket in each.asked for each in sorted(self._supposed) for bucket in self._uses(each))

    def prune(self, asked: bytes) -> None:
        """Drops the buckets, and then the calls, that no rank has needed by what `asked` says for all of them."""
        bits, dropped = iter(asked), set[int]()
        for each in sorted(self._supposed):
            event = self._events[each.entered]
            assert isinstance(event, Entered)
            uses = tuple(bucket for bucket in event.uses if next(bits))
            self._events[each.entered] = Entered(event.call, uses)
            if not uses:
                dropped |= {each.entered, each.left}
        self._events = [event for index, event in enumerate(self._events) if index not in dropped]
        self._supposed.clear()

    def _uses(self, supposed: _Supposed) -> tuple[int, ...]:
        event = self._events[supposed.entered]
        assert isinstance(event, Entered)
        return event.uses

    def clear(self) -> None:
        self._events.clear()
        self._supposed.clear()
