"""A clock that stands still unless it is told to go on, and a transport whose collectives take time by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from zeroweave.comm.clock import Clock, Tell
from zeroweave.comm.transport import Messages, Parts, ReduceOp, Spread
from zeroweave.layout import BucketLayout
from zeroweave.schedule import Costs
from zeroweave.schedule.facts import Kind


@dataclass
class VirtualClock:
    """`now` is the compute stream's time in seconds, which is the host's as well."""

    now: float = 0.0

    def mark(self) -> float:
        return self.now

    def after(self, wait: Callable[[], object], tell: Tell | None = None) -> float:
        raise NotImplementedError("virtual collectives know when they are over")

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def finish(self) -> None:
        return None

    def take_used(self) -> tuple[int, int]:
        return 0, 0

    def restart_peak(self) -> None:
        return None

    def peak(self) -> int:
        return 0


@dataclass
class VirtualPending:
    clock: VirtualClock
    end: float = float("nan")
    waited: bool = False

    def wait(self) -> None:
        assert not self.waited, "a collective was waited for twice"
        self.waited = True
        self.clock.now = max(self.clock.now, self.end)

    def over(self, clock: Clock) -> float:
        return self.end


@dataclass
class VirtualTransport:
    """One rank that moves nothing: collectives run one after the other, each as long as `costs` say.

    `calls`: (kind, bucket, issued, over).
    """

    costs: Costs
    clock: VirtualClock = field(default_factory=VirtualClock)
    calls: list[tuple[str, int, float, float]] = field(default_factory=list)
    free: float = 0.0
    rank: int = 0
    world: int = 1

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _issue(self, kind: Kind, bucket: int, nbytes: int) -> VirtualPending:
        self.free = max(self.clock.now, self.free) + self.costs.seconds(kind, bucket, nbytes)
        self.calls.append((kind, bucket, self.clock.now, self.free))
        return VirtualPending(self.clock, self.free)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> VirtualPending:
        return self._issue("all_gather", layout.id, flat.nbytes)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> VirtualPending:
        out.zero_()
        return self._issue("reduce_scatter", layout.id, layout.numel * out.itemsize)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> VirtualPending:
        raise NotImplementedError

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> VirtualPending:
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = "world") -> None:
        raise NotImplementedError

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError
