"""Whether GPUs reduce by pulling, and what it takes: memory that all of them reach, kernels, and room for those."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from zeroweave._torch.peers import Shared, are_linked, memory_for_peers, shared, where_handed_over
from zeroweave.comm.everywhere import apart, done_by_all
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.pending import side_of
from zeroweave.comm.pulling.kernel import BLOCKS, DTYPES, MOST_RANKS, PADS, Met, Pull, pull_kernel
from zeroweave.comm.pulling.reductions import FLATS, PeerFlats, PulledReductions
from zeroweave.comm.pulling.room import Room
from zeroweave.comm.transport import Transport
from zeroweave.errors import ConfigError
from zeroweave.ranks.answers import rendezvous
from zeroweave.ranks.board import machine
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import backstop

Asked = Literal["kernel", "pull"]

_OLDEST: Final = (9, 0)
"""The first compute capability that has clusters of thread blocks."""


class Gpu(NamedTuple):
    """A rank's, with what its process is like."""

    host: str
    capability: tuple[int, int]
    uuid: str
    sees: tuple[str, ...]
    """uuids of the GPUs that its process sees"""
    hands_over: str
    """where it hands memory over"""
    why_not: str = ""
    """why it cannot"""


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
) -> Pulling:
    """What all ranks do. Collective. ConfigError where pulling is asked for, in a world of several, and cannot be.

    `gradients`: elements and dtype of each flat of gradients.
    """
    fit = [(numel * dtype.itemsize, dtype) for numel, dtype in gradients if dtype in DTYPES]
    nbytes = typical(size for size, _ in fit)
    if not (why := _refused(asked, control, device, nbytes)):
        with torch.cuda.device(device):  # memory, kernels and cuBLAS are those of the current one
            made = _make(inner, control, device, ledger, nbytes, list(dict.fromkeys(dtype for _, dtype in fit)))
        if isinstance(made, Pulling):
            return made
        torch.cuda.empty_cache()  # memory that peers have let go of
        why = made
    if asked == "pull" and control.world > 1:
        raise ConfigError(f"transport.reductions is 'pull': {why}. Set it to 'kernel'")
    return Pulling(f"by kernel: {why}")


def unfit(gpus: Sequence[Gpu]) -> str:
    """Why these GPUs, by rank, cannot read each other's memory, or ""; whether they are linked is another question."""
    if len(gpus) > MOST_RANKS:
        return f"there are {len(gpus)} ranks, and a GPU pulls from {MOST_RANKS} at most"
    whys = apart([(gpu.host, gpu.uuid) for gpu in gpus])
    for rank, (gpu, why) in enumerate(zip(gpus, whys, strict=True)):
        if gpu.capability < _OLDEST:
            found = f"{gpu.capability[0]}.{gpu.capability[1]}"
            return f"the GPU of rank {rank} has compute capability {found}: it takes 9.0"
        if why:
            return why
        if gpu.why_not:
            return f"rank {rank}: {gpu.why_not}"
        if gpu.hands_over != gpus[0].hands_over:
            return (
                f"ranks 0 and {rank} hand memory over in different folders (TMPDIR), or number processes differently, "
                "as containers of their own do"
            )
        for other, one in enumerate(gpus):
            if one.uuid not in gpu.sees:
                return (
                    f"the process of rank {rank} does not see the GPU of rank {other} (CUDA_VISIBLE_DEVICES), and so "
                    "does not know whether they are linked"
                )
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
    gpus = control.all_gather_object(_gpu(device), "whether GPUs can read each other's memory")
    if why := unfit(gpus):
        return why
    numbers = [gpus[control.rank].sees.index(gpu.uuid) for gpu in gpus]

    def look() -> None:
        if not are_linked(numbers):
            raise RuntimeError("there is not NVLink between each two of the GPUs")

    return done_by_all(control, look, "whether GPUs are linked")


def _gpu(device: torch.device) -> Gpu:
    """This rank's."""
    all_of = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    uuids, mine = tuple(str(each.uuid) for each in all_of), torch.cuda.get_device_properties(device)
    return Gpu(machine(), (mine.major, mine.minor), str(mine.uuid), uuids, *where_handed_over(device))


class _SetUp:
    """What it takes, made in `steps`. Each may fail on one rank alone; so all ranks take it, and go on or none does."""

    def __init__(
        self,
        name: str,
        control: Control,
        device: torch.device,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """`name`: of this set-up, the same on all ranks. `sizes`: bytes of memory that all ranks reach; flats first."""
        self._name, self._control, self._device = name, control, device
        self._sizes, self._dtypes = sizes, dtypes
        self._tensors: list[torch.Tensor] = []
        self.rooms: list[Room] = []
        self.memory: list[Shared] = []
        self.gone = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.pulls: dict[torch.dtype, Pull] = {}

    def steps(self) -> Iterator[tuple[Callable[[], object], str]]:
        """Each step, and what is made by it."""
        memory = "memory that other GPUs read"
        yield self._make_room, "room beside matmuls"
        yield self._allocate, memory
        yield self._meet, memory  # who meets waits for the others, so that all have something to share before
        yield self._mark, memory
        yield self._compare, memory
        yield self._clear, memory
        yield self._make_kernels, "kernels that pull"

    def _make_room(self) -> None:
        room = Room(self._device, BLOCKS)
        room.begin()
        room.end()
        self.rooms.append(room)

    def _allocate(self) -> None:
        torch.cuda.empty_cache()  # what is cached fits nothing of this
        self._tensors.extend(memory_for_peers(size, self._device) for size in self._sizes)

    def _meet(self) -> None:
        control = self._control
        assert control.board is not None
        # Less than what the others wait for whoever gives up.
        seconds = control.deadline_seconds / 2
        with rendezvous(control.board, "memory of peers", control.deadline_seconds) as store:
            self.memory.extend(shared(self._tensors, self._name, control.rank, control.world, store, seconds))

    def _sign(self, number: int, rank: int) -> int:
        return 1 + number * self._control.world + rank

    def _mark(self) -> None:
        self._write(self._sign(number, self._control.rank) for number in range(len(self.memory)))

    def _compare(self) -> None:
        """Is what was handed over the memory that it should be, and can it be read?"""
        for number, each in enumerate(self.memory):
            for rank in range(self._control.world):
                if each.first_of(rank) != self._sign(number, rank):
                    raise RuntimeError(f"what came as memory of rank {rank} is not that")

    def _clear(self) -> None:
        self._write(0 for _ in self.memory)

    def _write(self, signs: Iterable[int]) -> None:
        for each, sign in zip(self.memory, signs, strict=True):
            each.tensor[:1].fill_(sign)
            int(each.tensor[0])  # it is there once it was read

    def _make_kernels(self) -> None:
        *tables, pads = (torch.tensor(each.addresses, dtype=torch.int64, device=self._device) for each in self.memory)
        if self._device.type == "cuda":
            self.gone = self.gone.pin_memory()
        seconds = backstop(self._control.deadline_seconds).total_seconds()
        met, rank, world = Met(torch.stack(tables), pads, self.gone, seconds), self._control.rank, self._control.world
        self.pulls.update((dtype, pull_kernel(dtype, rank, world, world, met)) for dtype in self._dtypes)


def _make(
    inner: Transport,
    control: Control,
    device: torch.device,
    ledger: Ledger,
    nbytes: int,
    dtypes: Sequence[torch.dtype],
) -> Pulling | str:
    """What it takes, or why it could not be had. Collective."""
    name = control.broadcast_object(f"zeroweave {uuid.uuid4()}")
    made = _SetUp(name, control, device, [nbytes] * FLATS + [PADS], dtypes)
    for step, what in made.steps():
        if why := done_by_all(control, step, what):
            return why
    flats = PeerFlats(made.memory[:-1], made.memory[-1], made.gone)
    transport = PulledReductions(inner, flats, made.pulls, ledger, side_of(device, priority=-1))
    why = f"by pulling up to {nbytes / (1 << 20):g} MiB, and by kernel above"
    return Pulling(why, transport, made.rooms[0])
