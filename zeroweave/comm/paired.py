"""Collectives that are compared between the ranks before they are issued.

gloo ends the process that receives a message which is longer than its buffer, and pairs those that fit without a
word. Where ranks may go different ways they therefore say on the host which collective comes next, and learn there
that they differ, all of them, while nothing is lost. It costs a short all-gather on the host per collective. NCCL needs
no such thing: ranks that differ wait, and the alarm finds out.
"""

from __future__ import annotations

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.ranks.control import Control
from zeroweave.ranks.differ import next_collective


class Paired(Around):
    """A transport that hands everything on to `inner` once all ranks of `control` are about to do the same.

    Raises AgreementError, on all ranks, where they are not, or where one does not come before the deadline.
    """

    def __init__(self, inner: Transport, control: Control, ledger: Ledger) -> None:
        super().__init__(inner)
        self._control, self._ledger = control, ledger

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._meet("all_gather", layout.id)
        return self._inner.all_gather(flat, shard, layout)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._meet("reduce_scatter", layout.id)
        return self._inner.reduce_scatter(out, parts, layout, op)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._meet("all_reduce", layout.id)
        return self._inner.all_reduce(out, parts, layout, op)

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        self._meet("all_to_all", messages.bucket)
        return self._inner.all_to_all(out, mine, messages)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._meet("broadcast", -1)
        self._inner.broadcast(tensor, source, group)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._meet("all_reduce", -1)
        self._inner.all_reduce_sum(tensor)

    def _meet(self, kind: str, bucket: int) -> None:
        ledger = self._ledger
        name = ledger.name_of(bucket)
        self._control.barrier(next_collective(ledger.count + 1, ledger.call, ledger.module, kind, name))
