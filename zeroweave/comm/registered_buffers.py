"""Registered buffers: memory at fixed addresses, in which flats take turns.

Copy engines and CUDA graphs know flats by their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from zeroweave._torch.storages import unfilled
from zeroweave.comm.ledger import Gauge

_GRAIN: Final = 2 << 20
_LEAST: Final = 20 << 20
"""PyTorch takes memory in multiples of the one, and at least the other for all but small tensors."""
_SMALL: Final = 1 << 20
"""Tensors up to this size are small."""


class FixedMemory:
    """One block of a pool of device memory that no other code allocates from, for one storage at a time.

    A storage gets it by being resized inside the pool. PyTorch hands a free block out to the stream that allocated it
    first, and inside a capture it uses the capture's own pool for all that the capturing stream allocates. So the
    block is always asked for on one stream, which runs nothing. The order of its users is that of ordinary flats: a
    gather follows all work that its issuing stream was given before, and a storage is given up when the current
    stream has waited for its gather and was given the last work that reads it.
    """

    def __init__(self, nbytes: int, device: torch.device, allocator: Any = None) -> None:
        """`allocator`: that of the pool; None: PyTorch's own."""
        small = nbytes <= _SMALL and allocator is None
        self.nbytes = _SMALL if small else max(_LEAST, -(-nbytes // _GRAIN) * _GRAIN)
        self._device, self._stream = device, torch.Stream(device=device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(allocator)
        self.address = self.tensor().data_ptr()

    def tensor(self) -> torch.Tensor:
        """All of it as a uint8 tensor; free again when the tensor is dropped."""
        with self._stream, torch.cuda.use_mem_pool(self._pool, self._device):
            return unfilled(self.nbytes, torch.uint8, self._device)

    def give(self, storage: torch.UntypedStorage) -> None:
        """`storage`, which has no bytes, gets all of it; it is free again when the storage is resized.

        If that fails, the storage still has no bytes.
        """
        with self._stream, torch.cuda.use_mem_pool(self._pool, self._device):
            storage.resize_(self.nbytes)
        if storage.data_ptr() != self.address:
            storage.resize_(0)
            raise RuntimeError("a flat is outside its registered buffer: its values would be gathered elsewhere")

    def close(self) -> None:
        """Nothing is gathered there any more. A storage that still has the memory keeps it. Collective."""


def fixed_buffers(device: torch.device, gauge: Gauge) -> RegisteredBuffers:
    """Buffers at fixed addresses of a CUDA device. A rank without memory for one gathers anywhere."""

    def make(nbytes: int) -> FixedMemory | None:
        torch.cuda.empty_cache()  # else the memory of earlier flats would stay cached as well
        try:
            return FixedMemory(nbytes, device)
        except torch.OutOfMemoryError:
            return None

    return RegisteredBuffers(make, gauge)


class Tenant(Protocol):
    """The owner of a storage that has the memory of a registered buffer."""

    storage: torch.UntypedStorage

    def leave(self) -> None:
        """Moves its storage to other memory, content included; calls `RegisteredBuffer.left`."""


class RegisteredBuffer:
    """A piece of memory, and the tenant whose storage has it."""

    def __init__(self, memory: FixedMemory) -> None:
        self.memory = memory
        self._tenant: Tenant | None = None

    def take(self, tenant: Tenant) -> None:
        """Gives the memory to the storage of `tenant`, which has no bytes. The tenant before leaves."""
        self.vacate()
        self.memory.give(tenant.storage)
        self._tenant = tenant

    def left(self) -> None:
        """The storage that was here was resized."""
        self._tenant = None

    def vacate(self) -> None:
        """The tenant leaves, if there is one."""
        if self._tenant is not None:
            self._tenant.leave()


class RegisteredBuffers:
    """The buffers of one engine, by number. `make(nbytes)` makes memory, of at least that; `gauge` counts its bytes.

    `make` is collective, and returns None on all ranks if one of them has no memory; `tell(nbytes)` is told so, once.
    A buffer that is large enough is used again: buffers stay, so that windows of several kinds take turns.
    """

    def __init__(
        self,
        make: Callable[[int], FixedMemory | None] = lambda nbytes: None,
        gauge: Gauge | None = None,
        tell: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._make, self._gauge, self._tell = make, gauge or Gauge(), tell
        self._buffers: dict[int, RegisteredBuffer] = {}
        self._spares = False
        self.refused: int | None = None
        """so many bytes could not be had on some rank, and are not asked for again; None: there was always memory"""

    def spare(self) -> None:
        """The next `fit` gives back what it does not ask for, before it makes anything. Equally on all ranks."""
        self._spares = True

    def fit(self, sizes: Mapping[int, int]) -> dict[int, RegisteredBuffer]:
        """The buffers of these numbers, of at least so many bytes each. Equally on all ranks.

        One for which there is no memory is missing.
        """
        if self._spares:
            self._spares = False
            for number in sorted(self._buffers.keys() - sizes.keys()):
                self._give_back(number)
        return {number: buffer for number in sorted(sizes) if (buffer := self._fit(number, sizes[number])) is not None}

    def _fit(self, number: int, nbytes: int) -> RegisteredBuffer | None:
        buffer = self._buffers.get(number)
        if buffer is not None and buffer.memory.nbytes >= nbytes:
            return buffer
        if self.refused is not None and nbytes >= self.refused:
            return None
        if buffer is not None:  # a buffer that is too small makes room for the larger one
            self._give_back(number)
        memory = self._make(nbytes)
        if memory is None:
            if self.refused is None:
                self._tell(nbytes)
            self.refused = nbytes
            return None
        self._gauge.add(memory.nbytes)
        buffer = self._buffers[number] = RegisteredBuffer(memory)
        return buffer

    def _give_back(self, number: int) -> None:
        """Its tenant leaves, and its memory is given up."""
        buffer = self._buffers[number]
        buffer.vacate()  # may raise if there is no memory: the buffer then still exists
        self._close(buffer)
        del self._buffers[number]

    def _close(self, buffer: RegisteredBuffer) -> None:
        self._gauge.add(-buffer.memory.nbytes)
        buffer.memory.close()

    @property
    def nbytes(self) -> int:
        """Of all buffers together."""
        return self._gauge.now

    def close(self) -> None:
        """Gives all memory back, for good. Collective."""
        for _, buffer in sorted(self._buffers.items()):
            self._close(buffer)
        self._buffers.clear()
