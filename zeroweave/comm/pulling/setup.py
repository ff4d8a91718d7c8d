"""Whether GPUs reduce by pulling, and what it takes: memory that all of them reach, kernels, and room for those."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from zeroweave._torch.peers import Shared, are_linked, memory_for_peers, shared
from zeroweave.comm.everywhere import apart, done_by_all
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import side_of
from zeroweave.comm.pulling.kernel import BLOCKS, DTYPES, MOST_RANKS, PADS, Met, Pull, pull_kernel
from zeroweave.comm.pulling.reductions import FLATS, PeerFlats, PulledReductions
from zeroweave.comm.pulling.room import Room
from zeroweave.comm.transport import Transport
from zeroweave.errors import ConfigError
from zeroweave.ranks.answers import rendezvous
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import backstop

Asked = Literal["kernel", "pull"]

_OLDEST: Final = (9, 0)
"""The first compute capability that has clusters of thread blocks."""


@dataclass(frozen=True)
class Pulling:
    """Which way reductions take and `why`; where some are pulled `room`, and `transport`, whose flats have an end."""

    why: str
    transport: PulledReductions | None = None
    room: Room | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that is there for it."""
        return 0 if self.transport is None else FLATS * self.transport.flats.nbytes


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
    inner: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    sizes: Sequence[int],
    dtypes: Iterable[torch.dtype],
) -> Pulling:
    """What all ranks do. Collective. ConfigError where pulling is asked for, in a world of several, and cannot be.

    `sizes`: bytes of the flats of gradients, which have `dtypes`.
    """
    nbytes = typical(sizes)
    if not (why := _refused(asked, control, device, nbytes)):
        with torch.cuda.device(device):  # memory, kernels and cuBLAS are those of the current one
            made = _make(inner, control, device, ledger, nbytes, [d for d in dtypes if d in DTYPES])
        if isinstance(made, Pulling):
            return made
        why = made
    if asked == "pull" and control.world > 1:
        raise ConfigError(f"transport.reductions is 'pull': {why}. Set it to 'kernel'")
    return Pulling(f"by kernel: {why}")


def _refused(asked: Asked, control: Control, device: torch.device, nbytes: int) -> str:
    """Why nothing can be pulled, or need not; "" where it can. Collective where it might."""
    if asked == "kernel":
        return "transport.reductions is 'kernel'"
    if control.world == 1:
        return "nothing is reduced in a world of 1"
    if not nbytes:
        return "no gradients are reduced over all ranks"
    if device.type != "cuda":
        return f"ranks compute on {device.type}"
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
    whys = apart([(host, gpu) for host, _, gpu, _ in ranks])
    for rank, ((_, capability, _, _), why) in enumerate(zip(ranks, whys, strict=True)):
        if capability < _OLDEST:
            return f"the GPU of rank {rank} has compute capability {capability[0]}.{capability[1]}: it takes 9.0"
        if why:
            return why
    indices = [each[3] for each in ranks]
    if len(set(indices)) < len(indices):
        return "each process sees GPUs of its own (CUDA_VISIBLE_DEVICES), and so none tells whether they are linked"

    def look() -> None:
        if not are_linked(indices):
            raise RuntimeError("there is not NVLink between each two of the GPUs")

    return done_by_all(control, look, "whether GPUs are linked")


def _make(
    inner: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    nbytes: int,
    dtypes: Sequence[torch.dtype],
) -> Pulling | str:
    """What it takes, or why it could not be had. Collective."""
    rooms: list[Room] = []
    if why := done_by_all(control, lambda: rooms.append(Room(device, BLOCKS)), "room beside matmuls"):
        return why
    memory: list[Shared] = []
    if why := _reach(control, device, [nbytes] * FLATS + [PADS], memory):
        return why
    *tables, pads = (torch.tensor(each.addresses, dtype=torch.int64, device=device) for each in memory)
    gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    met = Met(torch.stack(tables), pads, gone, backstop(control.deadline_seconds).total_seconds())
    pulls: dict[torch.dtype, Pull] = {}

    def compile_() -> None:
        pulls.update((d, pull_kernel(d, inner.rank, inner.world, inner.world, met)) for d in dtypes)

    if why := done_by_all(control, compile_, "kernels that pull"):
        return why
    flats = PeerFlats(memory[:-1], memory[-1], gone)
    transport = PulledReductions(inner, flats, pulls, ledger, side_of(device, priority=-1))
    return Pulling(f"by pulling up to {nbytes / (1 << 20):g} MiB, and by kernel above", transport, rooms[0])


def _reach(control: Control, device: torch.device, sizes: Sequence[int], found: list[Shared]) -> str:
    """Adds zeros of these sizes to `found` that all ranks reach; why it could not be had, or "". Collective."""
    tensors: list[torch.Tensor] = []

    def allocate() -> None:
        torch.cuda.empty_cache()  # what is cached fits nothing of this
        tensors.extend(memory_for_peers(size, device).zero_() for size in sizes)
        torch.cuda.synchronize(device)

    def meet() -> None:
        assert control.board is not None
        seconds = control.deadline_seconds
        for number, tensor in enumerate(tensors):
            with rendezvous(control.board, f"memory of peers {number}", seconds) as store:
                found.append(shared(tensor, f"{name} {number}", control.rank, control.world, store, seconds))

    name = control.broadcast_object(f"zeroweave {uuid.uuid4()}")
    what = "memory that other GPUs read"
    # Who meets waits for the others: nobody begins before all have something to share.
    return done_by_all(control, allocate, what) or done_by_all(control, meet, what)
