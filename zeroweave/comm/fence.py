"""Collectives that wait, for debugging: an error then shows where it happens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.pending import SideWork
from zeroweave.comm.transport import Pending, Transport
from zeroweave.config.sections import DebugConfig


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

    def _before(self, kind: str, bucket: int) -> None:
        switches = self._switches
        if kind != "broadcast":
            self._synchronize(switches.sync_before_allgather if kind == "all_gather" else switches.sync_before_reduce)

    def _after(self, kind: str, pending: Pending) -> Pending:
        switches = self._switches
        if not (switches.sync_after_allgather if kind == "all_gather" else switches.sync_after_reduce):
            return pending
        pending.wait()
        self._synchronize(True)
        return SideWork()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        super().all_reduce_sum(tensor)
        self._synchronize(self._switches.sync_after_reduce)

    def _synchronize(self, now: bool) -> None:
        if now and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def fenced(transport: Transport, device: torch.device, switches: DebugConfig) -> Transport:
    """`transport`, with fences if any of the switches asks for them."""
    wanted = any(on for name, on in switches if name.startswith("sync_"))
    return Fenced(transport, device, switches) if wanted else transport
