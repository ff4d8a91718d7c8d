"""Copies between one device and host memory, on their own stream. `transfers` says what they are for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from zeroweave._torch.storages import lent, reinterpreted
from zeroweave.comm.pending import on_side, side_of

_BLOCK: Final = 2**30
"""Bytes of a block of pinned memory, if nothing larger is asked for."""
_ALIGNMENT: Final = 256


class PinnedBlocks:
    """Pinned host memory, cut from a few large blocks. What is cut is free when all that is cut from its block is.

    PyTorch rounds each pinned allocation up to a power of two bytes, so blocks have such sizes. Each is about as large
    as all before it, up to a GiB: a small model pins little, and a large one wastes little. `allocate(nbytes)` makes a
    block, uint8 [nbytes].
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._open: list[tuple[torch.Tensor, int]] = []
        """blocks that have room, each with its first free byte"""
        self.nbytes = 0
        """of all blocks so far"""

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor [numel], with a version counter of its own."""
        nbytes = numel * dtype.itemsize
        block, begin = self._cut(nbytes)
        return reinterpreted(block[begin : begin + nbytes].view(dtype), (numel,), (1,), 0).zero_()

    def _cut(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """A block, and where in it `nbytes` begin that are free."""
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        index = next((i for i, (block, begin) in enumerate(self._open) if block.nbytes - begin >= nbytes), None)
        if index is None:
            wanted = max(nbytes, min(_BLOCK, self.nbytes), 1)
            size = 1 << (wanted - 1).bit_length()
            self._open.append((self._allocate(size), 0))
            self.nbytes += size
            index = len(self._open) - 1
        block, begin = self._open.pop(index)
        if block.nbytes - begin - nbytes >= _ALIGNMENT:
            self._open.insert(index, (block, begin + nbytes))
        return block, begin


class CopyStream:
    """Copies from and to one device, which run in the order of their issue.

    Device memory on either side of a copy must stay until the compute stream has waited for it (`wait`); pinned memory
    need not, as PyTorch uses it again only when the copies that it is part of are over. `stream`: None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, side_of(device)
        self.stream = None if self._side is None else self._side.stream
        self._blocks = PinnedBlocks(self.empty)

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in host memory."""
        if self.stream is None:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        return self._blocks.zeros(numel, dtype)

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
        """The end of what has been issued so far, for `wait`, and to be compared with `now`."""
        return None if self.stream is None else self._recorded(self.stream)

    def now(self) -> torch.Event | None:
        """The end of what the current stream has been given so far; None on the CPU."""
        return None if self.stream is None else self._recorded(self.current())

    def _recorded(self, stream: Any) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(stream)
        return event

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
