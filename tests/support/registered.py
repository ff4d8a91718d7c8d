"""Engines on the CPU that gather in registered buffers: the same decisions as on GPUs, other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from zeroweave.comm.copy_engine import Choice, CopyEngineGathers, no_room
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.registered_buffers import RegisteredBuffer, RegisteredBuffers
from zeroweave.comm.transport import Transport
from zeroweave.engine.transports import Communicators
from zeroweave.notices import Journal


class Slab:
    """Memory that one storage has at a time; it tells it by its size, an odd number of bytes that no other has."""

    def __init__(self, nbytes: int, number: int) -> None:
        self.nbytes, self.address = nbytes + 2 * number + 1, number
        self._storage: torch.UntypedStorage | None = None

    def give(self, storage: torch.UntypedStorage) -> None:
        assert storage.nbytes() == 0
        assert self._storage is None or self._storage.nbytes() != self.nbytes, "somebody is there"
        storage.resize_(self.nbytes)
        self._storage = storage

    def close(self) -> None:
        pass


class Slabs:
    """Counts what happens in the buffers of engines. There are `most` of them; None: as many as are asked for."""

    def __init__(self, most: int | None) -> None:
        self.made = self.gathers = self.evicted = 0
        self._most = most

    def make(self, nbytes: int) -> Slab | None:
        if self.made == self._most:
            return None
        self.made += 1
        return Slab(nbytes, self.made)

    def registered(self, flat: torch.Tensor) -> bool:
        is_placed = flat.untyped_storage().nbytes() % 2 == 1
        self.gathers += is_placed
        return is_placed

    def gather_by(
        self, asked: Any, transports: dict[str, Transport], communicators: Communicators, layouts: Any, journal: Journal
    ) -> tuple[RegisteredBuffers, Choice]:
        """In the place of the engine's: copy engines are taken for a process group."""
        for name, transport in transports.items():
            if isinstance(transport, ProcessGroupTransport):
                way = f"{name} by copy engine"
                engine = ProcessGroupTransport(
                    transport.group, communicators.device, communicators.ledger, way, in_place=True
                )
                transports[name] = CopyEngineGathers(transport, engine, self.registered)
        buffers = RegisteredBuffers(
            self.make,
            communicators.ledger.gauge("symmetric memory"),
            lambda nbytes: journal.warn("fallback", no_room(nbytes, "a test wants it")),
        )
        communicators.ends.callback(buffers.close)
        return buffers, Choice("a test wants it", least=1)


def in_registered_buffers(job: Callable[..., Any], *arguments: Any, most: int | None = None) -> tuple[Any, Slabs]:
    """What a job returns whose engines gather in buffers, `most` of them at most."""
    slabs, vacate = Slabs(most), RegisteredBuffer.vacate

    def counted(buffer: RegisteredBuffer) -> None:
        slabs.evicted += buffer._tenant is not None
        vacate(buffer)

    with (
        patch("zeroweave.engine.assembly.gather_by", slabs.gather_by),
        patch.object(RegisteredBuffer, "vacate", counted),
    ):
        return job(*arguments), slabs
