"""A device and links that only count: memory that is in use, and the time that everything would take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zeroweave._torch.fx import flatten
from zeroweave._torch.modes import OperatorMode
from zeroweave._torch.storages import storage_key
from zeroweave.comm.clock import Clock, Tell
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Messages, Parts, ReduceOp, Spread
from zeroweave.layout import ACROSS, INSIDE, WORLD, BucketLayout
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.work import eager_seconds
from zeroweave.runtime.copies import CopyStream


class Lane:
    """A stream: `now` is when it will have done what it was given, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        """It works for so long."""
        self.now += seconds

    def reach(self, time: float) -> None:
        """It waits until then."""
        self.now = max(self.now, time)

    def wait_event(self, event: Passed) -> None:
        """As streams of CUDA have it."""
        self.reach(event.time)


class Passed:
    """A time on some lane, with the methods of a CUDA event and of a collective. The clock's current lane waits.

    `alive` stays until it has been waited for.
    """

    def __init__(self, clock: PlannedClock, time: float, *alive: object) -> None:
        self._clock, self.time, self._alive = clock, time, alive

    def wait(self) -> None:
        self._clock.reach(self.time)
        self._alive = ()

    def over(self, clock: Clock) -> float:
        return self.time

    def query(self) -> bool:
        """True if it is over. The host keeps pace with the device."""
        return self._clock.now >= self.time

    def elapsed_time(self, end: Passed) -> float:
        return 1000 * (end.time - self.time)


class PlannedClock(Clock):
    """`now` is the time of the current lane, most of the time the computation's; the host takes none.

    It counts bytes of the device as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane()
        """the current one"""
        self._beside = self._peak = self._lately = 0
        """bytes without the flats, and at most of all: so far, and since `used` was last asked"""
        self._flats, self._away = Gauge(), Gauge()

    def attach(self, flats: Gauge, away: Gauge | None) -> None:
        """`flats` counts what is unsharded, `away` what was moved to host memory and still counts as alive;
        None: nothing is.

        Called once: their owner needs a clock first.
        """
        self._flats, self._away = flats, away or Gauge()

    @property
    def now(self) -> float:
        return self.lane.now

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Inside, that lane is the current one."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    def add(self, nbytes: int) -> None:
        """So many bytes more are in use, or fewer."""
        self._beside += nbytes
        self._look()

    def spend(self, seconds: float) -> None:
        """The current lane works for so long."""
        self.lane.spend(seconds)

    def reach(self, time: float) -> None:
        """The current lane waits until then."""
        self.lane.reach(time)

    def mark(self) -> float:
        self._look()
        return self.now

    def _look(self) -> None:
        now = self.allocated()
        self._peak, self._lately = max(self._peak, now), max(self._lately, now)

    def after(self, wait: Any, tell: Tell | None = None) -> float:
        raise NotImplementedError("planned collectives know when they are over")

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def finish(self) -> None:
        return None

    def allocated(self) -> int:
        """Bytes of the device in use now."""
        return self._beside + self._flats.now - self._away.now

    def take_used(self) -> tuple[int, int]:
        self._look()
        most, self._lately = self._lately, self.allocated()
        return self._lately, most

    def peak(self) -> int:
        return self._peak

    def restart_peak(self) -> None:
        self._peak = self.allocated()


class Meter(OperatorMode):
    """Inside, new storages count as memory until they are gone, and operators that run by themselves take time.

    Storages that exist before are not counted here: see `hold`.
    """

    def __init__(self, clock: PlannedClock, hardware: Hardware) -> None:
        super().__init__()
        self._clock, self._hardware = clock, hardware
        self._alive: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """its number, its bytes, and itself, of each storage, by its identity"""
        self.made = 0
        """storages so far"""
        self._inside = self._elsewhere = False

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay for as long as the rank does."""
        self._clock.add(sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values()))

    def alive(self, since: int) -> int:
        """Bytes in use of what was made after the first `since`."""
        return sum(nbytes for number, nbytes, _ in self._alive.values() if number >= since)

    @contextmanager
    def program(self) -> Iterator[None]:
        """Inside, a compiled program runs, which knows itself what time its kernels take."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, the host works, in its own memory."""
        before, self._elsewhere = self._elsewhere, True
        try:
            yield
        finally:
            self._elsewhere = before

    def ran(self, operator: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if self._elsewhere:
            return
        outputs = [leaf for leaf in flatten(out)[0] if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        given = set(map(storage_key, inputs))
        for tensor in outputs:
            if storage_key(tensor) not in given:
                self._count(tensor.untyped_storage())
        if not self._inside:
            self._clock.spend(eager_seconds(self._hardware, operator, args, kwargs, out))

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes, clock, alive = storage._cdata, storage.nbytes(), self._clock, self._alive
        if key in alive:
            return

        def gone(_: object) -> None:
            del alive[key]
            clock.add(-nbytes)

        alive[key] = self.made, nbytes, weakref.ref(storage, gone)
        self.made += 1
        clock.add(nbytes)


class PlannedKernel:
    """A kernel of updates. It computes nothing, and takes the time of what it reads and writes, or of its codes.

    Launched as Triton's are: `kernel[grid](tensors and numbers, by=name)`.
    """

    def __init__(self, clock: PlannedClock, hardware: Hardware, codes: bool = False) -> None:
        self._clock, self._hardware, self._codes = clock, hardware, codes

    def __getitem__(self, grid: tuple[int]) -> PlannedKernel:
        return self

    def __call__(
        self, master: torch.Tensor, remainder: torch.Tensor, gradient: torch.Tensor, *more: Any, **by: Any
    ) -> None:
        """Reads all of it, each tensor once, and writes all but the gradient."""
        state = {id(tensor): tensor for tensor in (master, remainder, *more) if isinstance(tensor, torch.Tensor)}
        state.pop(id(gradient), None)  # it stands in for what is not there
        nbytes = gradient.nbytes + 2 * sum(tensor.nbytes for tensor in state.values())
        if self._codes:
            self._clock.spend(self._hardware.coded(gradient.numel(), nbytes))
        else:
            self._clock.spend(self._hardware.compute(0.0, nbytes, gradient.itemsize))


class PlannedKernels:
    """Instead of `_triton.rules`."""

    BLOCK = 1

    def __init__(self, clock: PlannedClock, hardware: Hardware) -> None:
        self.adagrad = self.adam = self.lion = self.sgd = PlannedKernel(clock, hardware)
        self.compact_adam = PlannedKernel(clock, hardware, codes=True)

    def programs(self, numel: int) -> tuple[int]:
        return (numel,)


class PlannedTransport:
    """Rank 0 of `world` ranks, none of which is there. Collectives run one after the other, as long as they would.

    `group_size`: ranks of a sharding group, which gather and reduce by themselves, and across groups; None: all.

    As `comm.process_group` has it, a gather casts the shard first, and a reduction copies gradients into a flat.
    """

    def __init__(self, world: int, clock: PlannedClock, hardware: Hardware, group_size: int | None = None) -> None:
        self.rank, self.world = 0, world
        self._clock, self._hardware, group_size = clock, hardware, group_size or world
        self._lines = {
            WORLD: hardware.collective(world),
            INSIDE: hardware.collective(group_size),
            ACROSS: hardware.collective(world // group_size, stride=group_size),
        }
        self._free = 0.0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _issue(self, nbytes: int, copied: int, *alive: object, group: str = WORLD) -> Passed:
        begin = max(self._clock.now, self._free)
        self._free = begin + self._lines[group](nbytes) + self._hardware.traffic(copied)
        return Passed(self._clock, self._free, *alive)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Passed:
        as_it_is = shard.dtype == flat.dtype and layout.world > 1
        copied = 0 if as_it_is else shard.nbytes + flat.nbytes // layout.world
        return self._issue(flat.nbytes, copied, flat, shard, group=layout.group)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Passed:
        if layout.world == 1:
            return self._issue(out.nbytes, 2 * out.nbytes, group=layout.group)
        whole = isinstance(parts, torch.Tensor) and parts.dtype == out.dtype
        flat = parts if whole else torch.empty(layout.numel, dtype=out.dtype, device="cpu")
        nbytes = layout.numel * out.itemsize
        return self._issue(nbytes, 0 if whole else 2 * nbytes, flat, parts, out, group=layout.group)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._issue(tensor.nbytes, 0).wait()

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Passed:
        """Takes as long as a reduce-scatter and an all-gather."""
        return self._issue(2 * out.nbytes, 0, parts, out, group=layout.group)

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Passed:
        raise NotImplementedError("what is planned is AdamW's, which needs no whole matrices")

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = "world") -> None:
        raise NotImplementedError("nothing has values")


class PlannedCopies(CopyStream):
    """Copies that take their time concurrently with the computation, and move nothing."""

    def __init__(self, meter: Meter, clock: PlannedClock, hardware: Hardware) -> None:
        super().__init__(torch.device("cpu"))
        self._meter, self._clock, self._hardware = meter, clock, hardware
        self._lane = Lane()

    def empty(self, nbytes: int) -> torch.Tensor:
        with self._meter.elsewhere():
            return super().empty(nbytes)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._meter.elsewhere():
            return super().zeros(numel, dtype)

    def in_use(self) -> int:
        return self._clock.allocated()

    def capacity(self) -> int:
        return self._hardware.gpu.memory

    def moves(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided  # all tensors are of one subclass here

    @contextmanager
    def issue(self) -> Iterator[None]:
        now = self._clock.now
        with self._clock.on(self._lane):
            self._clock.reach(now)
            yield

    def here(self) -> AbstractContextManager[Any]:
        return self._clock.on(self._lane)

    def current(self) -> Lane:
        return self._clock.lane

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._clock.spend(self._hardware.copy(source.nbytes))

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def mark(self) -> Any:
        return Passed(self._clock, self._lane.now)

    def now(self) -> Any:
        return Passed(self._clock, self._clock.now)

    def finish(self) -> None:
        self._clock.reach(self._lane.now)
