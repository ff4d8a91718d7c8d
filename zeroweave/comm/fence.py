"""Collectives that wait, for debugging: an error then shows where it happens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.pending import SideWork
from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.config.sections import DebugConfig
from zeroweave.layout import BucketLayout


class Fenced(Around):
    """A transport that waits before it issues a collective or until it has finished, as the switches say.

    Before: everything that was issued to the device has finished; on a CPU it always has. After: the collective has
    finished, on the device too, before the call returns. `all_reduce_sum` and `all_to_all` count as
    reductions; a broadcast has no switch.
    """

    def __init__(self, inner: Transport, device: torch.device, switches: DebugConfig) -> None:
        super().__init__(inner)
        self._device, self._switches = device, switches

    def together(self) -> AbstractContextManager[None]:
        waits = self._switches.sync_after_allgather or self._switches.sync_after_reduce
        return nullcontext() if waits else self._inner.together()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._synchronize(self._switches.sync_before_allgather)
        return self._finish(self._inner.all_gather(flat, shard, layout), self._switches.sync_after_allgather)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._synchronize(self._switches.sync_before_reduce)
        return self._finish(self._inner.reduce_scatter(out, parts, layout, op), self._switches.sync_after_reduce)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._synchronize(self._switches.sync_before_reduce)
        return self._finish(self._inner.all_reduce(out, parts, layout, op), self._switches.sync_after_reduce)

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        self._synchronize(self._switches.sync_before_reduce)
        return self._finish(self._inner.all_to_all(out, mine, messages), self._switches.sync_after_reduce)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._synchronize(self._switches.sync_before_reduce)
        self._inner.all_reduce_sum(tensor)
        self._synchronize(self._switches.sync_after_reduce)

    def _finish(self, pending: Pending, now: bool) -> Pending:
        if not now:
            return pending
        pending.wait()
        self._synchronize(True)
        return SideWork()

    def _synchronize(self, now: bool) -> None:
        if now and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def fenced(transport: Transport, device: torch.device, switches: DebugConfig) -> Transport:
    """`transport`, with fences if any of the switches asks for them."""
    wanted = any(on for name, on in switches if name.startswith("sync_"))
    return Fenced(transport, device, switches) if wanted else transport
