"""Gathers through symmetric memory: GPUs of one node read each other's memory, without a collective's kernel.

Every rank has one staging buffer that the others can read. A gather is: wait until everybody has read what the
buffer held · copy the own shard into it · wait until everybody has · copy the others' into the flat. All of it
runs on a stream of its own; the two waits are small kernels, the copies need no multiprocessor at all.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import symmetric_buffer
from zeroweave.comm.around import Around
from zeroweave.comm.gauge import Gauge
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import Side
from zeroweave.comm.rounding import cast_
from zeroweave.comm.transport import Pending, Transport
from zeroweave.errors import ConfigError
from zeroweave.layout import BucketLayout
from zeroweave.ranks.control import Control


def check_symmetric_memory(control: Control, device: torch.device) -> None:
    """Raises ConfigError on all ranks unless they can read each other's memory. Collective."""
    mine = (socket.gethostname(), device.type, device.index)
    ranks = control.all_gather_object(mine)
    for rank, (host, kind, index) in enumerate(ranks):
        others = {at for _, _, at in ranks} - {index}
        if kind != "cuda":
            why = f"rank {rank} computes on {kind}; it needs CUDA GPUs that reach each other's memory"
        elif host != ranks[0][0]:
            why = f"rank {rank} is on {host}, rank 0 on {ranks[0][0]}; it works inside one node"
        elif blind := [at for at in others if kind == device.type and not _reaches(index, at)]:
            why = f"GPU {index} of rank {rank} cannot reach the memory of GPU {min(blind)}"
        else:
            continue
        raise ConfigError(f"symmetric_memory: {why}. Set symmetric_memory to false")


def _reaches(one: int, other: int) -> bool:
    # An index that this process does not see belongs to a rank with other visible devices: the rendezvous will tell.
    count = torch.cuda.device_count()
    return max(one, other) >= count or torch.cuda.can_device_access_peer(one, other)


class SymmetricGathers(Around):
    """All-gathers through symmetric memory; everything else is the business of `inner`.

    `staging` counts the bytes of the buffer, which `torch.cuda.max_memory_allocated` does not see.
    """

    def __init__(self, inner: Transport, group: dist.ProcessGroup, device: torch.device, ledger: Ledger) -> None:
        super().__init__(inner)
        self._group, self._device, self._ledger = group, device, ledger
        self._side = Side(device, priority=-1)
        self._buffer: torch.Tensor | None = None
        self._handle: Any = None
        self._gauge: Gauge = ledger.gauge("symmetric memory")

    @property
    def reserved(self) -> int:
        """Bytes of the staging buffer; 0 before the first gather."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def reserve(self, nbytes: int) -> None:
        """Makes the staging buffer hold a shard of `nbytes`. Collective where it has to grow."""
        if nbytes <= self.reserved:
            return
        torch.cuda.synchronize(self._device)  # peers may still read the smaller one
        dist.barrier(self._group)
        self.close()
        self._buffer, self._handle = symmetric_buffer(nbytes, self._device, self._group)
        self._gauge.add(nbytes)

    def close(self) -> None:
        """Gives the staging buffer back."""
        self._gauge.add(-self.reserved)
        self._buffer = self._handle = None

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        dtype = str(flat.dtype).removeprefix("torch.")
        self._ledger.record("all_gather", layout.id, dtype, flat.nbytes)
        self.reserve(flat.nbytes // self.world)
        chunks = flat.view(self.world, -1)
        numel = chunks.shape[1]
        with self._side:
            self._handle.barrier(channel=0)
            mine = self._handle.get_buffer(self.rank, (numel,), flat.dtype)
            cast_(mine, shard)
            self._handle.barrier(channel=0)
            for step in range(1, self.world):  # each reads from another rank, so that no link is shared
                peer = (self.rank + step) % self.world
                chunks[peer].copy_(self._handle.get_buffer(peer, (numel,), flat.dtype))
            chunks[self.rank].copy_(mine)
        return self._side.pending(flat, shard)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # copies have no launch to share
