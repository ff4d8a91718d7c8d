"""What an engine consists of, and what it lends to its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from zeroweave.comm.ledger import Ledger
from zeroweave.comm.wire import Wire
from zeroweave.config import Config
from zeroweave.eager.access import Shown
from zeroweave.eager.hooks import delivery
from zeroweave.engine.guard import Guard, Progress
from zeroweave.optim.adaptive import Adaptive
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.parameters.places import Places
from zeroweave.parameters.stub import Status
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Control
from zeroweave.runtime.runtime import Runtime
from zeroweave.schedule import Facts


@dataclass(frozen=True)
class Parts:
    """What an engine is assembled from; see `initialize`."""

    model: nn.Module
    config: Config
    runtime: Runtime
    ledger: Ledger
    transport: Wire
    control: Control
    alarm: Alarm
    progress: Progress
    guard: Guard
    places: Places
    status: Status
    optimizer: ShardedOptimizer | None
    original_dtypes: Mapping[str, torch.dtype]
    facts: Facts
    device: torch.device
    ends: ExitStack
    """ends what was started for the engine: its communicators, last the control group"""


def adaptive_of(parts: Parts) -> Adaptive | None:
    """What decides where the optimizer's states live, if the config leaves that open."""
    budget = parts.config.offload.memory_budget
    if budget is None or parts.optimizer is None:
        return None
    clock = parts.transport.clock
    return Adaptive(parts.optimizer.offload, budget, clock.peak, clock.restart_peak)


class Opened:
    """Everything gathered and readable for the user, between `open` and `close`. Neither minds a second call."""

    def __init__(self, runtime: Runtime, shown: Shown, status: Status) -> None:
        self._runtime, self._shown, self._status = runtime, shown, status
        self.is_open = False

    def open(self) -> None:
        if self.is_open:
            return
        for bucket in self._runtime.buckets.values():
            bucket.unshard()
        for bucket in self._runtime.buckets.values():
            bucket.wait()
        self._shown.open(delivery(self._runtime))
        self._status.full = self.is_open = True

    def close(self) -> None:
        if not self.is_open:
            return
        self._status.full = self.is_open = False
        self._shown.close()
        with ExitStack() as each:  # a parameter that was written raises, but the others go as well
            for bucket in self._runtime.buckets.values():
                each.callback(self._runtime.replay.lingering.reshard, bucket.id)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside nothing is open; at the end, unless that is an exception, what was is open again. Collective."""
        was_open = self.is_open
        self.close()
        yield
        if was_open:
            self.open()
