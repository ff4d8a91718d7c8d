"""What follows each step of an engine: saves that go on beside it, the log, and files of measured steps."""

from __future__ import annotations

from typing import Any

import torch

from zeroweave.comm.wire import Wire
from zeroweave.engine.checkpoints.checkpoints import Checkpoints
from zeroweave.engine.logs.log import Log
from zeroweave.engine.logs.noted import Noted
from zeroweave.engine.samples import Samples


class AfterStep:
    """Those of one engine. `log`, `samples`: None where nobody asked."""

    def __init__(self, transport: Wire, checkpoints: Checkpoints, log: Log | None, samples: Samples | None) -> None:
        self._transport, self._checkpoints, self._log, self._samples = transport, checkpoints, log, samples
        self._noted = Noted()
        """what both read of the open window"""

    @property
    def _look(self) -> bool:
        """Does anybody want to know of the present micro-step?"""
        return (self._log is not None or self._samples is not None) and not self._transport.skips

    def batch(self, training: bool, *batch: Any) -> None:
        """The module is called with this."""
        if training and self._look:
            self._noted.batch(*batch)

    def loss(self, loss: torch.Tensor, divisor: int) -> None:
        """A loss, unscaled, and what it is divided by where it is differentiated."""
        if self._look:
            self._noted.loss(loss, divisor)

    def aborted(self) -> None:
        """The window was given up."""
        self._noted.drop()

    def step_ended(self, boundary: bool) -> None:
        """After each `step()`; `boundary`: it was an optimizer step, or one that was skipped. Collective."""
        self._checkpoints.step_ended(boundary)
        if not (boundary and self._look):
            return
        loss, tokens = self._noted.take()
        if self._log is not None:
            self._log.step_ended(loss, tokens)
        if self._samples is not None:
            self._samples.step_ended(loss)

    def close(self) -> None:
        """The engine ends. Collective."""
        self._checkpoints.close()
        if self._log is not None:
            self._log.close()
