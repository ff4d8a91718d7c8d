"""Reductions by copy engines: ranks swap the parts of their flats without a kernel, and each adds up its own.

    send   the flat lies in registered memory: an outbox, which the backward has written into, or a copy
    swap   an all-to-all, behind which the inbox has this rank's part of every rank's flat
    add    a kernel makes the mean of these, in float32, in rank order, rounded once

One stream does that for one reduction after the other. So an inbox is read before the next swap, and a copy is sent
before the next one is made. A swap begins when all ranks have come to it, and so nobody writes into an inbox before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from zeroweave._torch.storages import lent, storage_use_count
from zeroweave.comm.around import Apart
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.parts import lay_out, tensors_of
from zeroweave.comm.pending import Beside, beside, side_of
from zeroweave.comm.process_group import await_
from zeroweave.comm.sums import mean_
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""Of flats that are swapped: sums are made in float32."""


class Outboxes:
    """Pieces of registered memory, uint8, that gradients are written into. One is free when no tensor lies there.

    `only_captures` get one, in an engine with graphs. A graph writes into its outbox in each replay, whoever has kept
    what a step in between has written there. In captures the same holds as for all memory of a graph.
    """

    def __init__(self, pieces: Sequence[torch.Tensor], only_captures: bool) -> None:
        self._only_captures = only_captures
        self._pieces = [(piece, piece.untyped_storage()) for piece in pieces]
        self._addresses = {storage.data_ptr() for _, storage in self._pieces}
        self._unused = [storage_use_count(storage) for _, storage in self._pieces]

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A flat [numel] in a free one; None: there is none, or nobody gets one now."""
        if self._only_captures and not torch.cuda.is_current_stream_capturing():
            return None
        for (piece, storage), unused in zip(self._pieces, self._unused, strict=True):
            if storage_use_count(storage) == unused:
                return piece[: numel * dtype.itemsize].view(dtype)
        return None

    def has(self, flat: torch.Tensor) -> bool:
        return flat.data_ptr() in self._addresses

    def close(self) -> None:
        """There are none any more. Whoever has a tensor there keeps it."""
        self._pieces.clear()
        self._unused.clear()
        self._addresses.clear()


class Exchange(Apart):
    """A transport whose reduce-scatters over all ranks are exchanges, where flats are small enough.

    `swap(received, sent)` starts an all-to-all of equal parts. `inbox` and `copies`, uint8, and the outboxes are
    equally large; `swap` knows them. Which reductions are exchanges follows from their layout and dtype, and so is the
    same on all ranks.
    """

    def __init__(
        self,
        inner: Transport,
        swap: Callable[[torch.Tensor, torch.Tensor], dist.Work],
        inbox: torch.Tensor,
        copies: torch.Tensor,
        outboxes: Outboxes,
        ledger: Ledger,
    ) -> None:
        super().__init__(inner)
        self._swap, self._inbox, self._copies, self._outboxes = swap, inbox, copies, outboxes
        self._ledger, self._on_host = ledger, inbox.device.type == "cpu"
        self._side = side_of(inbox.device, priority=-1)

    def close(self) -> None:
        """Nothing is exchanged any more, and the memory is not needed."""
        self._inbox = self._copies = torch.empty(0, dtype=torch.uint8)
        self._outboxes.close()

    def _exchanges(self, layout: Spread, dtype: torch.dtype) -> bool:
        fits = layout.group == WORLD and 0 < layout.numel * dtype.itemsize <= self._inbox.nbytes
        return fits and dtype in DTYPES and min(layout.chunks) == max(layout.chunks)

    def gradient_flat(self, layout: Spread, dtype: torch.dtype) -> torch.Tensor:
        flat = self._outboxes.take(layout.numel, dtype) if self._exchanges(layout, dtype) else None
        return super().gradient_flat(layout, dtype) if flat is None else flat

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        if not self._exchanges(layout, out.dtype):
            return super().reduce_scatter(out, parts, layout, op)
        self._launch(None)
        ledger = self._ledger
        with torch.no_grad(), beside(self._side):
            sent = self._sent(parts, layout, out.dtype)
            received = self._inbox[: sent.nbytes].view(out.dtype)
            name = dtype_name(out.dtype)
            ledger.record("reduce_scatter", layout.id, name, sent.nbytes, layout.group, layout.world)
            await_(self._swap(lent(received), lent(sent)).wait, ledger, ledger.count, self._on_host)
            mean_(out, received.view(layout.world, -1), self.world, op == "predivide")
        return Beside() if self._side is None else self._side.pending(out, *tensors_of(parts))

    def _sent(self, parts: Parts, layout: Spread, dtype: torch.dtype) -> torch.Tensor:
        """The flat, where it can be sent from."""
        if isinstance(parts, torch.Tensor) and parts.dtype == dtype and self._outboxes.has(parts):
            return parts
        copy = self._copies[: layout.numel * dtype.itemsize].view(dtype)
        lay_out(copy, parts, layout)
        return copy
