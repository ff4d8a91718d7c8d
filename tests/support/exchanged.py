"""Engines on the CPU whose gradients are exchanged, as on GPUs whose copy engines send them: over gloo instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from zeroweave.comm.exchange import Exchange, Outboxes
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.transport import Transport
from zeroweave.engine.ways import Links
from zeroweave.layout import WORLD


class Swaps:
    """Counts the swaps of engines, and the flats among them that had been written where they were sent from."""

    def __init__(self, nbytes: int, outboxes: int) -> None:
        self.swaps = self.in_place = 0
        self._nbytes, self._count = nbytes, outboxes

    def reduce_by(self, settings: Any, transports: dict[str, Transport], links: Links, *_: Any) -> str:
        """In the place of the engine's."""
        transport = transports[WORLD]
        assert isinstance(transport, ProcessGroupTransport)
        inbox, copies, *rest = (torch.empty(self._nbytes, dtype=torch.uint8) for _ in range(2 + self._count))

        def swap(received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
            self.swaps += 1
            self.in_place += sent.data_ptr() != copies.data_ptr()
            work = dist.all_to_all_single(received, sent, group=transport.group, async_op=True)
            assert work is not None
            return work

        transports[WORLD] = Exchange(transport, swap, inbox, copies, Outboxes(rest, only_captures=False), links.ledger)
        return "by copy engine: a test wants it"


def exchanged(job: Callable[..., Any], *arguments: Any, nbytes: int = 1 << 20, outboxes: int = 2) -> tuple[Any, Swaps]:
    """What a job returns whose engines exchange gradients of flats of at most `nbytes`."""
    swaps = Swaps(nbytes, outboxes)
    with patch("zeroweave.engine.assembly.reduce_by", swaps.reduce_by):
        return job(*arguments), swaps
