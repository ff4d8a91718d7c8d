"""Gathers by copy engines: NCCL moves the bytes without a kernel, so that matmuls keep all SMs.

It does so in a communicator that may use no SMs, if every rank's flat is at the same offset of memory that all ranks
have registered together. Otherwise it silently uses a kernel, and if the ranks' offsets differ, the values are wrong.
So each place (`comm.places`) is one piece of memory, registered as a whole, and a flat begins at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from zeroweave._torch.distributed import copying_communicator
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.places import FixedMemory
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.transport import Gatherer, Pending, Transport
from zeroweave.comm.wrappers import Around
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.ranks.control import Control


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

    `placed(flat)`: True if it is; the same on all ranks, see `runtime.bucket.seat`. Copies have no launch to share, so
    in the scope of `together` each run of gathers between them is one launch.
    """

    def __init__(self, inner: Transport, engine: Gatherer, placed: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(inner)
        self._engine, self._placed = engine, placed
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
        placed = self._placed(flat)
        if self._scope is not None and self._launching == placed:
            self._launching = not placed
            if placed:
                self._scope.close()
            else:
                self._scope.enter_context(self._inner.together())
        return (self._engine if placed else self._inner).all_gather(flat, shard, layout)


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

        Collective, like all methods but `placed`. None for a single rank. It is used once here: before that nothing
        can be registered.
        """
        control = self._control
        if control.rendezvous is None or control.world == groups:
            return None
        name = f"copy engines of {groups}.{control.rank % groups}"
        with control.rendezvous.store(name) as store:
            own = copying_communicator(store, control.rank // groups, control.world // groups, name, timeout)
            self._backends.append(own)
            own.allreduce([torch.ones(1, device=self._device)]).wait()
            torch.cuda.synchronize(self._device)
        control.barrier("the start of gathers by copy engines")  # a rank that meets the others still needs the store
        return own

    def close(self) -> None:
        """The communicators end; what they know was closed before."""
        while self._backends:
            self._backends.pop().shutdown()

    def around(self, transport: Transport, own: Any, ledger: Ledger, name: str = WORLD) -> CopyEngineGathers:
        """`transport`, that of the sharding group `name`, with gathers by `own` of flats in registered memory."""
        engine = ProcessGroupTransport(own, self._device, ledger, f"{name} by copy engine", in_place=True)
        return CopyEngineGathers(transport, engine, self.placed)

    def placed(self, flat: torch.Tensor) -> bool:
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
