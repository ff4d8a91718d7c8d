"""Gathers through a registered buffer, by copy engine: the key `symmetric_memory` of `zeroweave.dc` asks for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from zeroweave.comm.copy_engine import LEAST, CopyEngines, no_room, refused
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import SideWork, on_side, side_of
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.comm.transport import Pending, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.layout import BucketLayout
from zeroweave.notices import warn
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import at_end, backstop


class BufferedGathers(Around):
    """A transport whose gathers run in one registered buffer, one after the other, and are copied to their flats.

    `inner` gathers by copy engine into memory that `registered` has. A flat that is larger than the buffer is gathered
    in its own memory, by kernel. The buffer has one size on all ranks, so a gather runs in the same way on all ranks.
    """

    def __init__(self, inner: Transport, registered: RegisteredBuffers, control: Control, device: torch.device) -> None:
        super().__init__(inner)
        self._registered, self._control = registered, control
        self._side = side_of(device, priority=-1)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least as large as the largest `nbytes` of any rank. Collective."""
        nbytes = max(self._control.all_gather_object(nbytes, "the size of the registered buffer"))
        if nbytes <= self._buffer.nbytes:
            return
        self._buffer = self._buffer.new_empty(0)  # the old memory goes first
        if (found := self._registered.fit({0: nbytes}).get(0)) is not None:
            found.memory.give(self._buffer.untyped_storage())
            self._buffer.set_(self._buffer.untyped_storage())

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        if flat.nbytes > self._buffer.nbytes:
            return self._inner.all_gather(flat, shard, layout)
        gathered = self._buffer[: flat.nbytes].view(flat.dtype)
        with on_side(self._side), torch.no_grad():  # the next gather follows this copy, on the same stream
            self._inner.all_gather(gathered, shard, layout).wait()
            flat.copy_(gathered)
        return SideWork() if self._side is None else self._side.pending(flat, shard)

    def close(self) -> None:
        """Free the memory. Collective."""
        self._buffer = self._buffer.new_empty(0)
        self._registered.close()


def buffered(
    transport: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    ends: ExitStack,
    failed: Callable[[], bool],
) -> BufferedGathers | None:
    """`transport` with gathers through a registered buffer, which is empty at first. Collective; `at_end` ends it.

    None where the machine cannot do that. A warning says why.
    """
    if why := refused("auto", control, device, largest=LEAST):
        warn(f"symmetric_memory: {why}. Parameters are gathered as without it", control.rank)
        return None
    engines = CopyEngines(control, device)
    registered = RegisteredBuffers(
        engines.make,
        ledger.gauge("symmetric memory"),
        lambda nbytes: warn(no_room(nbytes, engines.why_not, "symmetric_memory"), control.rank),
    )
    with ExitStack() as started:
        started.callback(engines.close)
        inner = engines.around(transport, engines.join(backstop(control.deadline_seconds)), ledger)
        gathers = BufferedGathers(inner, registered, control, device)
        started.callback(gathers.close)
        at_end(ends, started.pop_all(), failed)
    return gathers
