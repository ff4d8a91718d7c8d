"""Gathers by copy engines: NCCL moves the bytes without a kernel, so that matmuls keep all SMs.

It does so in a communicator that may use no SMs, if every rank's flat is at the same offset of memory that all ranks
have registered together. Otherwise it silently uses a kernel, and if the ranks' offsets differ, the values are wrong.
So each registered buffer (`comm.registered_buffers`) is registered as a whole, and a flat begins at its start.

`refused` says where copy engines cannot gather or need not, `choose` which buckets they gather.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from zeroweave._torch.distributed import copying_communicator
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.registered_buffers import FixedMemory
from zeroweave.comm.transport import Gatherer, Pending, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.errors import ConfigError
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.ranks.control import Control

Asked = Literal["auto", "copy_engine", "kernel"]

OLDEST_NCCL: Final = (2, 28)
"""The first version that gathers by copy engines."""
LEAST: Final = 1 << 20
"""With "auto", copy engines gather flats of so many bytes and more.

Measured on H200s with NCCL 2.28, from 1 to 256 MiB (benchmarks/README.md): copy engines are faster than kernels while
matmuls run, and the matmuls lose less. `python -m benchmarks.gathers` measures it on another machine.
"""


@dataclass(frozen=True)
class Choice:
    """Copy engines gather buckets of `least` bytes and more; None: kernels gather all buckets. `why`: the reason."""

    why: str
    least: int | None = None

    def __str__(self) -> str:
        if self.least is None:
            return f"by kernel: {self.why}"
        size = f" from {self.least / (1 << 20):g} MiB on" if self.least >= LEAST else ""
        return f"by copy engine{size}: {self.why}"


def no_room(nbytes: int, why: str, key: str = "transport.gathers") -> str:
    """The warning for memory that cannot be registered. `key`: the key of the config that asks for it."""
    return (
        f"{key}: {nbytes / (1 << 20):g} MiB to gather in by copy engine could not be had ({why}): what has that size "
        "is gathered by kernel from now on, exact but slower"
    )


def refused(asked: Asked, control: Control, device: torch.device, largest: int, replicas: int = 1) -> str:
    """Why copy engines cannot gather, or need not; "" where they can. Collective where they might.

    `largest`: bytes of the largest flat. `replicas`: of buckets, see `layout`. ConfigError on all ranks where copy
    engines are asked for and cannot gather.
    """
    if asked == "kernel":
        return "transport.gathers is 'kernel'"
    if control.world == 1 or device.type != "cuda":
        why = "nothing is gathered in a world of 1" if control.world == 1 else f"ranks compute on {device.type}"
    elif replicas > 1:
        why = "the ranks of a group of sharding.group_size gather by kernel"
    elif asked == "auto" and largest < LEAST:
        return "no bucket has 1 MiB"
    else:
        version = torch.cuda.nccl.version() if dist.is_nccl_available() else (0,)
        mine = (socket.gethostname(), version, str(torch.cuda.get_device_properties(device).uuid))
        why = why_not(control.all_gather_object(mine, "whether copy engines can gather"))
    if why and asked == "copy_engine" and control.world > 1:
        raise ConfigError(f"[ZW107] transport.gathers is 'copy_engine': {why}. Set it to 'auto' or 'kernel'")
    return why


def why_not(ranks: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    """Why copy engines cannot gather between ranks of these (host, version of NCCL, uuid of the GPU), or ""."""
    gpus = [gpu for _, _, gpu in ranks]
    for rank, (host, version, gpu) in enumerate(ranks):
        if version[:2] < OLDEST_NCCL:
            return f"NCCL {'.'.join(map(str, version))} on rank {rank}: it needs {'.'.join(map(str, OLDEST_NCCL))}"
        if host != ranks[0][0]:
            return f"rank {rank} is on {host}, rank 0 on {ranks[0][0]}: it works inside one machine"
        if (first := gpus.index(gpu)) != rank:
            return f"ranks {first} and {rank} share a GPU"
    return ""


class Registered(FixedMemory):
    """Fixed memory that communicators know."""

    def __init__(self, nbytes: int, device: torch.device, allocator: Any, closed: Callable[[int], object]) -> None:
        """`allocator`: the backend's, whose memory can be registered. `closed(address)` is called at the end."""
        super().__init__(nbytes, device, allocator)
        self._closed = closed
        self._known_to: list[Any] = []

    def register(self, backends: list[Any]) -> None:
        """Makes it known to communicators, one after the other. Collective over the ranks of each."""
        torch.cuda.synchronize(self._device)
        for backend in backends:
            backend.register_mem_pool(self._pool, symm=True)
            self._known_to.append(backend)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._closed(self.address)
        while self._known_to:
            self._known_to.pop().deregister_mem_pool(self._pool)


class CopyEngineGathers(Around):
    """A transport that gathers through `engine` if the flat is in registered memory; all else is `inner`'s.

    `registered(flat)`: True if it is; the same on all ranks, see `runtime.bucket.assign_buffers`. Copies have no launch
    to share. In the scope of `together` each run of gathers between them is one launch.
    """

    def __init__(self, inner: Transport, engine: Gatherer, registered: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(inner)
        self._engine, self._registered = engine, registered
        self._scope: ExitStack | None = None
        """of `together`; it holds the launch that is open"""
        self._launching = False

    @contextmanager
    def together(self) -> Iterator[None]:
        with ExitStack() as scope:
            self._scope, self._launching = scope, False
            try:
                yield
            finally:
                self._scope = None

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        registered = self._registered(flat)
        if self._scope is not None and self._launching == registered:
            self._launching = not registered
            if registered:
                self._scope.close()
            else:
                self._scope.enter_context(self._inner.together())
        return (self._engine if registered else self._inner).all_gather(flat, shard, layout)


class CopyEngines:
    """The communicators of one engine that gather by copy engines, and the memory that they know."""

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device = control, device
        self._backends: list[Any] = []
        self._addresses: set[int] = set()
        """where memory that they know begins"""
        self.why_not = ""
        """why memory could last not be had, on the first rank that had none"""

    def join(self, timeout: timedelta, groups: int = 1) -> Any:
        """A communicator of this engine's ranks; with `groups`, that many: each rank's is that of its number.

        Collective, like all methods but `registered`. None for a single rank. It is used once here: before that nothing
        can be registered.
        """
        control = self._control
        if control.world == groups:
            return None
        name = f"copy engines of {groups}.{control.rank % groups}"
        with control.meeting(name) as store:
            own = copying_communicator(store, control.rank // groups, control.world // groups, name, timeout)
            self._backends.append(own)
            own.allreduce([torch.ones(1, device=self._device)]).wait()
            torch.cuda.synchronize(self._device)
        control.barrier("the start of gathers by copy engines")
        return own

    def close(self) -> None:
        """The communicators end; what they know was closed before."""
        while self._backends:
            self._backends.pop().shutdown()

    def around(self, transport: Transport, own: Any, ledger: Ledger, name: str = WORLD) -> CopyEngineGathers:
        """`transport`, that of the sharding group `name`, with gathers by `own` of flats in registered memory."""
        engine = ProcessGroupTransport(own, self._device, ledger, f"{name} by copy engine", in_place=True)
        return CopyEngineGathers(transport, engine, self.registered)

    def registered(self, flat: torch.Tensor) -> bool:
        """True if the flat begins where registered memory does."""
        return flat.data_ptr() in self._addresses

    def make(self, nbytes: int) -> Registered | None:
        """Registered memory of at least `nbytes`; None on all ranks if one of them cannot have it."""
        made: list[Registered] = []

        def allocate() -> None:
            torch.cuda.empty_cache()  # else the memory of earlier flats would stay cached, and fit nothing else
            made.append(Registered(nbytes, self._device, self._backends[0].mem_allocator, self._addresses.discard))

        def register() -> None:
            made[0].register(self._backends)

        # Registering waits for the other ranks: no rank begins before all have memory to register.
        if self.done_by_all(allocate) and self.done_by_all(register):
            self._addresses.add(made[0].address)
            return made[0]
        for memory in made:
            memory.close()
        return None

    def done_by_all(self, step: Callable[[], None]) -> bool:
        """Takes a step that may fail; True if it has failed on no rank."""
        why = ""
        try:
            step()
        except Exception as error:  # of any kind: of CUDA, or its libraries
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reasons = self._control.all_gather_object(why, "memory for gathers by copy engines")
        self.why_not = next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")
        return not self.why_not


def choose(asked: Asked, engines: CopyEngines) -> Choice:
    """The choice where `refused` has no reason against copy engines. Collective."""
    if asked == "copy_engine":
        return Choice("transport.gathers is 'copy_engine'", least=1)
    memory = engines.make(LEAST)
    if memory is None:
        return Choice(f"memory cannot be registered ({engines.why_not})")
    memory.close()
    torch.cuda.empty_cache()
    return Choice("that is faster beside matmuls", LEAST)
