"""Collectives that are compared between the ranks before they are issued.

gloo ends the process that receives a message which is longer than its buffer, and pairs those that fit without a
word. Where ranks may go different ways they therefore say on the host which collective comes next, and learn there
that they differ, all of them, while nothing is lost. It costs a short all-gather on the host per collective. NCCL needs
no such thing: ranks that differ wait, and the alarm finds out.
"""

from __future__ import annotations

from zeroweave.comm.around import Around
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.transport import Transport
from zeroweave.ranks.control import Control
from zeroweave.ranks.differ import next_collective


class Paired(Around):
    """A transport that hands everything on to `inner` once all ranks of `control` are about to do the same.

    Raises AgreementError, on all ranks, where they are not, or where one does not come before the deadline.
    """

    def __init__(self, inner: Transport, control: Control, ledger: Ledger) -> None:
        super().__init__(inner)
        self._control, self._ledger = control, ledger

    def _before(self, kind: str, bucket: int) -> None:
        ledger = self._ledger
        name = ledger.name_of(bucket)
        self._control.barrier(next_collective(ledger.count + 1, ledger.call, ledger.module, kind, name))
