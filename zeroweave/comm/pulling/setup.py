"""Whether GPUs reduce by pulling, and what it takes: memory that all of them reach, kernels, and room for those."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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

Asked = Literal["auto", "kernel", "pull"]

LEAST: Final = 16 << 20
"""Bytes of a typical flat from which on it is done unasked. What it gains with smaller ones was not measured."""
_MEASURED: Final = 9
"""GPUs of this major compute capability were measured, and gain by it."""
_OLDEST: Final = (9, 0)
"""The first compute capability that has clusters of thread blocks."""


class Gpu(NamedTuple):
    """A rank's. `number`: among those that its process sees."""

    host: str
    capability: tuple[int, int]
    uuid: str
    number: int


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
    gradients: Sequence[tuple[int, torch.dtype]],
    compiles: bool,
) -> Pulling:
    """What all ranks do. Collective. ConfigError where pulling is asked for, in a world of several, and cannot be.

    `gradients`: elements and dtype of each flat of gradients. `compiles`: are there compiled backwards, whose matmuls
    leave room?
    """
    fit = [(numel * dtype.itemsize, dtype) for numel, dtype in gradients if dtype in DTYPES]
    nbytes = typical(size for size, _ in fit)
    why = _needless(compiles, nbytes) if asked == "auto" else ""
    if not (why := why or _refused(asked, control, device, nbytes)):
        with torch.cuda.device(device):  # memory, kernels and cuBLAS are those of the current one
            made = _make(inner, control, device, ledger, nbytes, list(dict.fromkeys(dtype for _, dtype in fit)))
        if isinstance(made, Pulling):
            return made
        why = made
    if asked == "pull" and control.world > 1:
        raise ConfigError(f"transport.reductions is 'pull': {why}. Set it to 'auto' or 'kernel'")
    return Pulling(f"by kernel: {why}")


def _needless(compiles: bool, nbytes: int) -> str:
    """Why nothing would be gained, or "" where something may be."""
    if not compiles:
        return "nothing is compiled, and so no matmul leaves room for a kernel that pulls"
    if nbytes < LEAST:
        return f"most gradients lie in buckets of less than {LEAST >> 20} MiB"
    return ""


def unfit(asked: Asked, gpus: Sequence[Gpu]) -> str:
    """Why these GPUs, by rank, cannot read each other's memory fast, or need not; "" where nothing is against it."""
    if len(gpus) > MOST_RANKS:
        return f"there are {len(gpus)} ranks, and a GPU pulls from {MOST_RANKS} at most"
    whys = apart([(gpu.host, gpu.uuid) for gpu in gpus])
    for rank, (gpu, why) in enumerate(zip(gpus, whys, strict=True)):
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        if gpu.capability < _OLDEST:
            return f"the GPU of rank {rank} has compute capability {capability}: it takes 9.0"
        if asked == "auto" and gpu.capability[0] != _MEASURED:
            return f"whether GPUs of compute capability {capability} gain by it is not known"
        if why:
            return why
    if len({gpu.number for gpu in gpus}) < len(gpus):
        return "each process sees GPUs of its own (CUDA_VISIBLE_DEVICES), and so none tells whether they are linked"
    return ""


def _refused(asked: Asked, control: Control, device: torch.device, nbytes: int) -> str:
    """Why nothing can be pulled, or need not; "" where it can. Collective where it might."""
    if asked == "kernel":
        return "transport.reductions is 'kernel'"
    if control.world == 1:
        return "nothing is reduced in a world of 1"
    if not nbytes:
        return "no gradients in bfloat16, float16 or float32 are reduced over all ranks"
    if device.type != "cuda":
        return f"ranks compute on {device.type}"
    if torch.version.hip is not None:
        return "the kernel that pulls is for GPUs of NVIDIA"
    properties = torch.cuda.get_device_properties(device)
    mine = Gpu(socket.gethostname(), (properties.major, properties.minor), str(properties.uuid), device.index)
    gpus = control.all_gather_object(mine, "whether GPUs can read each other's memory")
    if why := unfit(asked, gpus):
        return why
    indices = [gpu.number for gpu in gpus]

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
