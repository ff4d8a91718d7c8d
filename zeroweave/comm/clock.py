"""Clocks: when things happen on the device, told without waiting for it.

A `Mark` is a point in the order of the current stream. Marks are made while a step runs and read afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from zeroweave._torch.streams import busy_wait

Mark = Any
"""A point in time; what it is is the clock's affair."""

Tell = Callable[[Callable[[], None]], None]
"""Takes a function and calls it, on some thread, when something is over."""

_POLL_SECONDS = 1e-4
_LATE_SECONDS = 1.0
"""How long after the end of a step the backend may still tell that a collective of it is over."""


class Clock:
    """Tells when the current stream, or a collective, comes to a point. This one is the host's, for CPUs."""

    def __init__(self) -> None:
        self._awaited: list[list[float]] = []

    def mark(self) -> Mark:
        """Now, in the order of the current stream."""
        return [time.perf_counter()]

    def after(self, wait: Callable[[], object], tell: Tell | None = None) -> Mark:
        """When something is over: `wait` lets the current stream wait for it, `tell` tells the host, None: it is."""
        if tell is None:
            return self.mark()
        mark: list[float] = []
        self._awaited.append(mark)
        tell(lambda: mark.append(time.perf_counter()))  # on a thread of the backend
        return mark

    def seconds(self, start: Mark, stop: Mark) -> float:
        """From one mark to another; both must have been passed, see `finish`."""
        return float(stop[0] - start[0])

    def finish(self) -> None:
        """Returns when all marks have been passed."""
        awaited, self._awaited = self._awaited, []
        end = time.monotonic() + _LATE_SECONDS
        for mark in awaited:
            while not mark and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if not mark:
                mark.append(time.perf_counter())

    def hold(self, seconds: float) -> None:
        """The device waits for so long before it goes on, so that the host gets ahead of it; a CPU does not."""

    def allocated(self) -> int:
        """Bytes of device memory in use now; 0 where nobody counts."""
        return 0

    def peak(self) -> int:
        """Bytes of device memory in use at most so far; 0 where nobody counts."""
        return 0

    def restart_peak(self) -> None:
        """The peak counts from now on, for everybody in this process."""


class DeviceClock(Clock):
    """Events of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def after(self, wait: Callable[[], object], tell: Tell | None = None) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            wait()
            return self.mark()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop) / 1e3

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def hold(self, seconds: float) -> None:
        busy_wait(seconds, self._device)

    def allocated(self) -> int:
        # as memory_allocated, which flattens all statistics first: ten times the price, for every instruction
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock of whatever computes on `device`."""
    return DeviceClock(device) if device.type == "cuda" else Clock()
