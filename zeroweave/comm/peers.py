"""Whether GPUs reduce by pulling, and what it takes: memory that all of them reach, kernels, and room for those."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from zeroweave._torch.peers import Shared, are_linked, memory_for_peers, shared
from zeroweave.comm.everywhere import done_by_all
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import side_of
from zeroweave.comm.pull import FLATS, PeerFlats, PulledReductions
from zeroweave.comm.pull_kernel import BLOCKS, DTYPES, MOST_RANKS, PADS, Pull, pull_kernel
from zeroweave.comm.room import Room
from zeroweave.comm.transport import Transport
from zeroweave.errors import ConfigError
from zeroweave.ranks.answers import rendezvous
from zeroweave.ranks.control import Control

Asked = Literal["auto", "pull", "kernel"]

LEAST: Final = 16 << 20
"""Bytes of a flat from which on "auto" pulls. What is smaller is reduced in less time than matmuls take beside it."""
_OLDEST: Final = (9, 0)
"""The first compute capability that has clusters of thread blocks."""


@dataclass(frozen=True)
class Pulling:
    """Which way reductions take and `why`; `transport`, `flats` to be closed and `room` where some are pulled."""

    why: str
    flats: PeerFlats | None = None
    transport: PulledReductions | None = None
    room: Room | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that is there for it."""
        return 0 if self.flats is None else FLATS * self.flats.nbytes


def typical(sizes: Iterable[int]) -> int:
    """The size of flat for which memory is had: half of all bytes lie in flats that are no larger. 0 if there are none.

    Memory for the largest ones, of an embedding or a head, would take more than they gain.
    """
    ordered = sorted(sizes)
    half, below = sum(ordered) / 2, 0
    for size in ordered:
        below += size
        if below >= half:
            return size
    return 0


def pulling(
    asked: Asked,
    compiles: bool,
    inner: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    sizes: Sequence[int],
    dtypes: Iterable[torch.dtype],
) -> Pulling:
    """What all ranks do; nothing here is measured, as it decides in which order values are added. Collective.

    `compiles`: are there compiled backwards, whose matmuls leave room? `sizes`: bytes of the flats of gradients, which
    have `dtypes`. ConfigError where pulling is asked for and cannot be.
    """
    nbytes = typical(sizes)
    why, made = _refused(asked, compiles, control, device, nbytes), Pulling("")
    if not why:
        why, made = _make(asked, inner, control, device, ledger, nbytes, [d for d in dtypes if d in DTYPES])
    if not why:
        return made
    if asked == "pull" and control.world > 1:
        raise ConfigError(f"transport.reductions is 'pull': {why}. Set it to 'auto' or 'kernel'")
    return Pulling(f"by kernel: {why}")


def _refused(asked: Asked, compiles: bool, control: Control, device: torch.device, nbytes: int) -> str:
    """Why nothing can be pulled, or need not; "" where it can. Collective where it might."""
    if asked == "kernel":
        return "transport.reductions is 'kernel'"
    if control.world == 1 or device.type != "cuda":
        return "nothing is reduced in a world of 1" if control.world == 1 else f"ranks compute on {device.type}"
    if asked == "auto" and not compiles:
        return "nothing is compiled whose matmuls leave room"
    if asked == "auto" and nbytes < LEAST:
        return f"most of the parameters lie in buckets of less than {LEAST >> 20} MiB"
    if torch.version.hip is not None:
        return "the kernel that pulls is for GPUs of NVIDIA"
    if control.world > MOST_RANKS:
        return f"there are {control.world} ranks, and a GPU pulls from {MOST_RANKS} at most"
    return _apart(control, device)


def _apart(control: Control, device: torch.device) -> str:
    """Why one GPU cannot read the memory of another one fast, or "". Collective."""
    properties = torch.cuda.get_device_properties(device)
    mine = socket.gethostname(), (properties.major, properties.minor), str(properties.uuid), device.index
    ranks = control.all_gather_object(mine, "whether GPUs can read each other's memory")
    for rank, (host, capability, gpu, _) in enumerate(ranks):
        if capability < _OLDEST:
            return f"the GPU of rank {rank} has compute capability {capability[0]}.{capability[1]}: it takes 9.0"
        if host != ranks[0][0]:
            return f"rank {rank} is on {host}, rank 0 on {ranks[0][0]}: it works inside one machine"
        if (other := [each[2] for each in ranks].index(gpu)) != rank:
            return f"ranks {other} and {rank} share a GPU"
    indices = [each[3] for each in ranks]
    if len(set(indices)) < len(indices):
        return "each process sees GPUs of its own (CUDA_VISIBLE_DEVICES), and so none tells whether they are linked"

    def look() -> None:
        if not are_linked(indices):
            raise RuntimeError("there is not NVLink between each two of the GPUs")

    return done_by_all(control, look, "whether GPUs are linked")


def _make(
    asked: Asked,
    inner: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    nbytes: int,
    dtypes: Sequence[torch.dtype],
) -> tuple[str, Pulling]:
    """Why it could not be had, or ""; and what was made. Collective."""
    rooms: list[Room] = []
    why = done_by_all(control, lambda: rooms.append(Room(device, BLOCKS)), "room beside matmuls")
    memory: list[Shared] = []
    if not why:
        why = _reach(control, device, [nbytes] * FLATS + [PADS], memory)
    pulls: dict[torch.dtype, Pull] = {}
    if not why:
        *flats, pads = (torch.tensor(each.addresses, dtype=torch.int64, device=device) for each in memory)
        tables = torch.stack(flats), pads

        def compile_() -> None:
            pulls.update((d, pull_kernel(d, inner.rank, inner.world, inner.world, *tables)) for d in dtypes)

        why = done_by_all(control, compile_, "kernels that pull")
    if why:
        return why, Pulling("")
    least = LEAST if asked == "auto" else 1
    found = PeerFlats(memory[:-1], memory[-1])
    transport = PulledReductions(inner, found, pulls, least, ledger, side_of(device, priority=-1))
    why = f"by pulling from {least / (1 << 20):g} to {nbytes / (1 << 20):g} MiB"
    return "", Pulling(why, found, transport, rooms[0])


def _reach(control: Control, device: torch.device, sizes: Sequence[int], found: list[Shared]) -> str:
    """Adds zeros of these sizes to `found` that all ranks reach; why it could not be had, or "". Collective."""
    tensors: list[torch.Tensor] = []

    def allocate() -> None:
        torch.cuda.empty_cache()  # what is cached fits nothing of this
        tensors.extend(memory_for_peers(size, device).zero_() for size in sizes)
        torch.cuda.synchronize(device)

    def meet() -> None:
        assert control.board is not None
        with rendezvous(control.board, "memory of peers", control.deadline_seconds) as store:
            for number, tensor in enumerate(tensors):
                found.append(shared(tensor, f"{name} {number}", control.rank, control.world, store))

    name = control.broadcast_object(f"zeroweave {uuid.uuid4()}")
    what = "memory that other GPUs read"
    # Who meets waits for the others: nobody begins before all have something to share.
    return done_by_all(control, allocate, what) or done_by_all(control, meet, what)
