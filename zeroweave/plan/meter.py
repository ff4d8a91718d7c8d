"""Memory and time of a rank that has neither: a count of what is alive, and a clock that is told what things take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeroweave._torch.fx import flatten
from zeroweave._torch.modes import OperatorMode
from zeroweave._torch.storages import storage_key
from zeroweave.comm.clock import Clock, Tell
from zeroweave.comm.ledger import Gauge
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.work import eager_seconds


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
