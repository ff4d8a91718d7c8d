"""Where the time of compilation goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("dynamo", "aot", "partition", "wait", "lower")


class Phases:
    """Seconds of each phase of compilation, exclusive: a phase inside another does not count for both.

    `dynamo`: capture of graphs and guards. `aot`: AOTAutograd's tracing of forward and backward. `partition`: the split
    into the two, Inductor's joint passes included. `wait`: for another rank of this machine that compiles the same
    graph. `lower`: from graphs to code. Others may be added by their name.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(NAMES, 0.0)
        self.total = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time inside for `name`, less that of phases inside."""
        began, inside = time.perf_counter(), self.total
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began - (self.total - inside))

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.total += seconds
