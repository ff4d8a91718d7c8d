"""What follows each step of an engine: asynchronous saves, the log, and files of measured steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zeroweave.comm.wire import Wire
from zeroweave.engine.checkpoints.checkpoints import Checkpoints
from zeroweave.engine.logs.log import Log
from zeroweave.engine.samples import Samples


class AfterStep:
    """Those of one engine. `log`, `samples`: None where they were not asked for."""

    def __init__(self, transport: Wire, checkpoints: Checkpoints, log: Log | None, samples: Samples | None) -> None:
        self._transport, self._checkpoints, self._log, self._samples = transport, checkpoints, log, samples
        self._losses: list[torch.Tensor] = []
        """of the open window, unscaled"""
        self._tokens = 0
        """of the open window"""

    @property
    def _look(self) -> bool:
        """True if the log or the samples need the present micro-step."""
        return (self._log is not None or self._samples is not None) and not self._transport.skips

    def batch(self, training: bool, *batch: Any) -> None:
        """The module is called with this."""
        if training and self._look:
            self._tokens += tokens_of(batch)

    def loss(self, loss: torch.Tensor, divisor: int) -> None:
        """A loss, unscaled, and what it is divided by where it is differentiated. Waits for no device.

        What it becomes later does not matter.
        """
        if self._look:
            kind = torch.promote_types(loss.dtype, torch.float32)
            self._losses.append(loss.detach().mean(dtype=kind) / divisor)  # a copy: graphs write theirs again

    def window_ended(self) -> None:
        """The window is over, or was given up: nothing of it counts any more."""
        self._losses, self._tokens = [], 0

    def step_ended(self, boundary: bool) -> None:
        """After each `step()`; `boundary`: it was an optimizer step, or one that was skipped. Collective."""
        self._checkpoints.step_ended(boundary)
        if not (boundary and self._look):
            return
        # The optimizer step's gradients are of this sum.
        loss, tokens = torch.stack(self._losses).sum() if self._losses else None, self._tokens
        self.window_ended()
        if self._log is not None:
            self._log.step_ended(loss, tokens)
        if self._samples is not None:
            self._samples.step_ended(loss)

    def close(self) -> None:
        """The engine ends. Collective."""
        self._checkpoints.close()
        if self._log is not None:
            self._log.close()


def tokens_of(batch: Any) -> int:
    """How many tokens a batch has: the elements of its `input_ids`, or else of its first two-dimensional integers.

    Padding counts. 0 where there is nothing of the kind.
    """
    first = 0
    for name, tensor in _tensors("", batch):
        if name == "input_ids":
            return tensor.numel()
        if not first and tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            first = tensor.numel()
    return first


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    match value:
        case torch.Tensor():
            yield name, value
        case Mapping():
            for key, item in value.items():
                yield from _tensors(str(key), item)
        case list() | tuple():
            for item in value:
                yield from _tensors(name, item)
