"""What a device's clock tells of memory, whoever else starts PyTorch's counters anew."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from zeroweave.comm.clock import Clock, DeviceClock, clock_of

GIB = 1 << 30


class Allocator:
    """Stands in for that of PyTorch, with what it counts in bytes."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most = self.most_reserved = self.retries = 0
        self.free, self.total, self.fraction = 6 * GIB, 10 * GIB, 1.0
        self.looks = 0

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.most = max(self.most, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.most, self.most_reserved = self.allocated, self.reserved

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        self.looks += 1
        return {
            "num_alloc_retries": self.retries,
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.most}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.most_reserved}},
        }

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self.fraction


def clock_over(allocator: Allocator) -> DeviceClock:
    names = [name for name in dir(Allocator) if "mem" in name]
    for name in names:
        patch.object(torch.cuda, name, getattr(allocator, name)).start()
    with patch.object(torch.cuda, "Stream"):
        return DeviceClock(torch.device("cuda", 0))


def test_peaks_are_remembered() -> None:
    allocator = Allocator()
    try:
        clock = clock_over(allocator)
        allocator.take(700)
        assert clock.peak() == clock.reserved() == 700
        allocator.take(-600)
        allocator.reset_peak_memory_stats()  # by the program
        assert clock.peak() == 700
        allocator.take(300)
        allocator.take(-300)
        assert clock.take_used() == (100, 400) and clock.take_used() == (100, 100)
        assert clock.peak() == 700
        clock.restart_peak()
        assert clock.peak() == 100 and clock.reserved() == 700, "the allocator keeps what it has"
        allocator.retries, looks = 2, allocator.looks
        assert clock.strain() == (700, 2) and clock.strain() == (0, 2)
        assert allocator.looks == looks + 2, "statistics are dear: one look for both"
    finally:
        patch.stopall()


def test_rises_are_told_apart_from_what_was_before() -> None:
    allocator = Allocator()
    try:
        clock = clock_over(allocator)

        def takes(nbytes: int) -> None:
            allocator.take(nbytes)
            allocator.take(-nbytes)

        takes(500)
        assert clock.strain()[0] == 500 and clock.strain()[0] == 0
        takes(400)
        assert clock.strain()[0] == 0, "nobody knows, beyond that it was no more"
        takes(600)
        assert clock.peak() == 600 and clock.strain()[0] == 600, "whoever else looks"
        allocator.reset_peak_memory_stats()  # by the program
        takes(300)
        assert clock.strain()[0] == 300 and allocator.most == 300, "whose peak goes on"
        takes(450)
        clock.take_used()  # while a step is timed
        takes(350)
        assert clock.strain()[0] == 450 and clock.strain()[0] == 0
        clock.take_used()
        takes(350)
        assert clock.strain()[0] == 350, "as much as before, and counted from zero"
        assert clock.peak() == 600
    finally:
        patch.stopall()


def test_room_is_what_is_held_and_a_share_of_what_is_free() -> None:
    allocator = Allocator()
    try:
        clock = clock_over(allocator)
        allocator.take(2 * GIB)
        assert clock.room() == 8 * GIB and clock.room(sharing=2) == 5 * GIB
        allocator.fraction = 0.5
        assert clock.room() == 5 * GIB and clock.room(sharing=3) == 4 * GIB
    finally:
        patch.stopall()


def test_nobody_counts_on_a_cpu() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is Clock
    assert (clock.take_used(), clock.peak(), clock.strain(), clock.reserved()) == ((0, 0), 0, (0, 0), 0)
    assert clock.room() == 0
