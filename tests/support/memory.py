"""A device that has memory, and counts it, where there is none: for engines on gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from zeroweave.comm.clock import Clock, Rises, Tell

REST = 20_000
"""Bytes that are in use between two steps."""


class CountedClock(Clock):
    """A device of `size` bytes. In use: flats, gradient flats, `REST`, and what a test adds.

    Each mark is a millisecond behind the one before: schedules follow from nothing that is measured.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.added, self.refused = size, 0, 0
        self._peak = self._lately = 0
        self._rises = Rises()
        self._gauges: tuple[Any, ...] = ()
        self._ticks = 0

    def attach(self, engine: Any) -> None:
        """Counts what this engine gathers. Once."""
        self._gauges = engine._runtime.flats, engine._runtime.gradients.flats

    def mark(self) -> Any:
        self._ticks += 1
        return [1e-3 * self._ticks]

    def after(self, wait: Callable[[], object], tell: Tell | None = None) -> Any:
        return self.mark()

    def add(self, nbytes: int) -> None:
        """So many bytes more are in use, or fewer."""
        self.added += nbytes
        self._look()

    def take_used(self) -> tuple[int, int]:
        now = self._look()
        self._rises.read(self._lately)
        self._rises.restarted()
        most, self._lately = self._lately, now
        return now, most

    def peak(self) -> int:
        self._look()
        return self._peak

    def strain(self) -> tuple[int, int]:
        self._look()
        self._rises.read(self._lately)
        return self._rises.take(), self.refused

    def room(self, sharing: int = 1) -> int:
        return self.size

    def _look(self) -> int:
        now = REST + self.added + sum(gauge.now for gauge in self._gauges)
        self._peak, self._lately = max(self._peak, now), max(self._lately, now)
        return now


@contextmanager
def counted(size: int) -> Iterator[CountedClock]:
    """Engines that are made inside count the memory of such a device."""
    clock = CountedClock(size)

    def clock_of(device: torch.device) -> Clock:
        return clock

    with patch("zeroweave.comm.wrappers.clock_of", clock_of):
        yield clock
