"""An account of memory in use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Gauge:
    """Bytes in use at present and at most."""

    now: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now

    def restart(self) -> None:
        """Restarts `peak`."""
        self.peak = self.now
