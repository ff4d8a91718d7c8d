"""Communication that is switched off, to see what a step costs without it, and what it would have sent."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.pending import SideWork, on_side, side_of
from zeroweave.comm.rounding import cast
from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD, BucketLayout


class Skipping(Around):
    """A transport in the place of `inner` that issues nothing at all.

    Skipped gathers fill the flat with copies of this rank's shard: real numbers, because processors draw less power
    on zeros, and are slow on denormals. A skipped all-to-all receives what this rank sends, over and over, or zeros
    where that is nothing. Skipped reductions give zeros; a skipped broadcast or `all_reduce_sum` leaves its tensor as
    it is. All are asynchronous as real ones are. `planned` counts what would have been sent;
    nothing in a world of 1.
    """

    def __init__(self, inner: Transport, device: torch.device, planned: Ledger) -> None:
        super().__init__(inner)
        self._planned = planned
        self._side = side_of(device)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._plan("all_gather", flat.dtype, flat.numel(), layout)
        with on_side(self._side), torch.no_grad():
            flat.view(layout.world, -1).copy_(cast(shard, flat.dtype))
        return self._filled(flat, shard)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._zeros("reduce_scatter", out, layout)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._zeros("all_reduce", out, layout)

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        if self.world > 1:
            self._planned.record("all_to_all", messages.bucket, "uint8", messages.payload)
        with on_side(self._side), torch.no_grad():
            if mine.numel():
                out.copy_(mine.repeat(-(-out.numel() // mine.numel()))[: out.numel()])
            else:
                out.zero_()
        return self._filled(out, mine)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._plan("broadcast", tensor.dtype, tensor.numel())

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._plan("all_reduce", tensor.dtype, tensor.numel())

    def _zeros(self, kind: str, out: torch.Tensor, layout: Spread) -> Pending:
        self._plan(kind, out.dtype, layout.numel, layout)
        with on_side(self._side), torch.no_grad():
            out.zero_()
        return self._filled(out)

    def _plan(self, kind: str, dtype: torch.dtype, numel: int, layout: Spread | None = None) -> None:
        """`layout`: of a bucket; None: the tensor belongs to all ranks."""
        name, nbytes = dtype_name(dtype), numel * dtype.itemsize
        if layout is None and self.world > 1:
            self._planned.record(kind, -1, name, nbytes)
        elif layout is not None and layout.world > 1:
            self._planned.record(kind, layout.id, name, nbytes, layout.group, layout.world)

    def _filled(self, *alive: torch.Tensor) -> Pending:
        return SideWork() if self._side is None else self._side.pending(*alive)
