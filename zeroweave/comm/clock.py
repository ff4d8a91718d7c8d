"""Clocks: the times of events on the device, taken without waiting for it.

A `Mark` is a point in the order of the current stream. Marks are made while a step runs and read afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from zeroweave._torch.cuda import busy_wait

Mark = Any
"""A point in time; its type depends on the clock."""

Tell = Callable[[Callable[[], None]], None]
"""Takes a function and calls it, on any thread, when an operation is over."""

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
        """The end of an operation: `wait` makes the current stream wait for it, `tell` tells the host (None: over)."""
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
        """The device waits for so long before it continues, so that the host gets ahead of it; a CPU does not wait."""

    def take_used(self) -> tuple[int, int]:
        """Bytes of device memory in use now, and at most since this was last taken; 0 where they are not counted."""
        return 0, 0

    def peak(self) -> int:
        """Bytes of device memory in use at most so far; 0 where they are not counted."""
        return 0

    def strain(self) -> tuple[int, int]:
        """Bytes of device memory in use at most since this was last asked, 0 where it was no more than before that.

        And how often so far the device had no memory left, and the allocator returned unused memory to try again.
        Both are 0 where they are not counted. No other counter is reset.
        """
        return 0, 0

    def reserved(self) -> int:
        """Bytes of device memory that the allocator has held at most so far; 0 where they are not counted."""
        return 0

    def restart_peak(self) -> None:
        """The peak counts from now on, for the whole process."""

    def room(self, sharing: int = 1) -> int:
        """Bytes that may be in use at most: what the allocator holds, and this rank's share of what is free.

        `sharing`: so many ranks compute on the device. 0 where memory is not counted.
        """
        return 0

    def give_back(self) -> None:
        """Returns memory that the allocator holds and does not use to the device."""


class Rises:
    """The peak of a counter since it was last asked, even if other code resets the counter.

    An unchanged counter shows nothing: the count was never higher than before.
    """

    def __init__(self) -> None:
        self._stood = self._most = 0

    def read(self, stands: int) -> None:
        """The counter was read. A lower value than before means that it was reset meanwhile."""
        if stands != self._stood:
            self._stood, self._most = stands, max(self._most, stands)

    def restarted(self) -> None:
        """The counter was reset: any value from now on was reached since."""
        self._stood = 0

    def take(self) -> int:
        """The peak since this was last asked; 0 if it was no higher than before."""
        most, self._most = self._most, 0
        return most


class DeviceClock(Clock):
    """Events of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._peak = self._reserved = 0
        """bytes, as read since the last restart"""
        self._rises = Rises()

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

    def take_used(self) -> tuple[int, int]:
        # as memory_allocated, which flattens all statistics first: at ten times the cost, for every instruction
        bytes_ = self._counted()["allocated_bytes"]["all"]
        self._restart_counters()
        return int(bytes_["current"]), int(bytes_["peak"])

    def peak(self) -> int:
        self._counted()
        return self._peak

    def strain(self) -> tuple[int, int]:
        refusals = int(self._counted()["num_alloc_retries"])
        return self._rises.take(), refusals

    def reserved(self) -> int:
        self._counted()
        return self._reserved

    def restart_peak(self) -> None:
        self._restart_counters()
        self._peak = self._reserved = 0

    def room(self, sharing: int = 1) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        return min(reserved + free // sharing, allowed)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def _counted(self) -> dict[str, Any]:
        """The allocator's counts. Other code may reset its peaks, so they are remembered here."""
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)
        peak = int(counted["allocated_bytes"]["all"]["peak"])
        self._rises.read(peak)
        self._peak = max(self._peak, peak)
        self._reserved = max(self._reserved, int(counted["reserved_bytes"]["all"]["peak"]))
        return counted

    def _restart_counters(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._rises.restarted()


def clock_of(device: torch.device) -> Clock:
    """The clock of computation on `device`."""
    return DeviceClock(device) if device.type == "cuda" else Clock()
