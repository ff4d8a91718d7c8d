"""Copies between one device and host memory, on their own stream. `transfers` says what they are for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zeroweave._torch.storages import lent
from zeroweave.comm.pending import on_side, side_of


class CopyStream:
    """Copies from and to one device, which run in the order of their issue.

    Device memory on either side of a copy must stay until the compute stream has waited for it (`wait`); pinned memory
    need not, as PyTorch uses it again only when the copies that it is part of are over. `stream`: None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, side_of(device)
        self.stream = None if self._side is None else self._side.stream

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in host memory."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self.stream is not None)

    def in_use(self) -> int:
        """Bytes of device memory in use, by the allocator's count; 0 on the CPU, where they are not counted."""
        return 0 if self.stream is None else torch.cuda.memory_allocated(self._device)

    def capacity(self) -> int:
        """Bytes of device memory that may be in use: what the allocator holds and what is free; 0 on the CPU."""
        if self.stream is None:
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def moves(self, tensor: torch.Tensor) -> bool:
        """True if the storage of a tensor may be emptied and filled again; a subclass may keep anything there."""
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        return plain and tensor.device == self._device

    def issue(self) -> AbstractContextManager[None]:
        """Copies made inside follow all work that the current stream has been given so far."""
        return on_side(self._side)

    def here(self) -> AbstractContextManager[Any]:
        """Inside, the current stream is this one: a wait there holds up this stream, and work that waits for it.

        Work issued inside waits for nothing else.
        """
        return nullcontext() if self.stream is None else self.stream

    def current(self) -> Any:
        """The current stream of the device; not on the CPU."""
        return torch.cuda.current_stream(self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between two tensors of one shape and dtype, one on the device; inside `issue`."""
        target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a contiguous tensor, 1-D, for a transport that may keep it for longer than it is used."""
        return lent(tensor)

    def mark(self) -> torch.Event | None:
        """The end of what has been issued so far, for `wait`."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: torch.Event | None) -> None:
        """Work that the current stream is given from now on follows a mark; inside `issue`, copies follow it."""
        if mark is not None:
            self.current().wait_event(mark)

    def reach(self, mark: torch.Event | None) -> None:
        """The host waits for a mark, in any thread."""
        if mark is not None:
            with torch.cuda.device(self._device):  # a new thread would set up the first device for itself
                mark.synchronize()

    def finish(self) -> None:
        """The host waits for everything that has been issued."""
        if self.stream is not None:
            self.stream.synchronize()
