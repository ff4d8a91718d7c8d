"""Memory and time of a rank that has neither: a count of what is alive, and a clock that is told what things take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zeroweave._torch.fake import OperatorMode
from zeroweave._torch.fx import flatten
from zeroweave._torch.storages import storage_key
from zeroweave.comm.clock import Clock, Tell
from zeroweave.comm.gauge import Gauge
from zeroweave.comm.transport import Messages, Parts, ReduceOp, Spread
from zeroweave.layout import BucketLayout
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.work import eager_seconds
from zeroweave.schedule import Line


class PlannedClock(Clock):
    """`now` is the compute stream's time in seconds; the host takes none. It counts bytes of the device as well."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._beside = self._peak = 0
        """bytes beside the flats, and at most of all"""
        self._flats = Gauge()

    def attach(self, flats: Gauge) -> None:
        """`flats` counts what is unsharded. Once: whoever has them needs a clock first."""
        self._flats = flats

    def add(self, nbytes: int) -> None:
        """So many bytes more are in use, or fewer."""
        self._beside += nbytes
        self._peak = max(self._peak, self.allocated())

    def spend(self, seconds: float) -> None:
        """The compute stream works for so long."""
        self.now += seconds

    def reach(self, time: float) -> None:
        """The compute stream waits until then."""
        self.now = max(self.now, time)

    def mark(self) -> float:
        self._peak = max(self._peak, self.allocated())
        return self.now

    def after(self, wait: Any, tell: Tell | None = None) -> float:
        raise NotImplementedError("planned collectives know when they are over")

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def finish(self) -> None:
        return None

    def allocated(self) -> int:
        return self._beside + self._flats.now

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
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._inside = False

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """These stay for as long as the rank does."""
        self._clock.add(sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values()))

    @contextmanager
    def program(self) -> Iterator[None]:
        """Inside, a compiled program runs, which knows itself what time its kernels take."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def ran(self, operator: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
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

        alive[key] = weakref.ref(storage, gone)
        clock.add(nbytes)


class _Pending:
    """A collective that is over at `end`; `alive` stays until it has been waited for."""

    def __init__(self, clock: PlannedClock, end: float, *alive: object) -> None:
        self._clock, self._end, self._alive = clock, end, alive

    def wait(self) -> None:
        self._clock.reach(self._end)
        self._alive = ()

    def over(self, clock: Clock) -> float:
        return self._end


class PlannedTransport:
    """Rank 0 of `world` ranks, none of which is there. Collectives run one after the other, as long as they would.

    As `comm.process_group` has it, a gather casts the shard first, and a reduction copies gradients into a flat.
    """

    def __init__(self, world: int, clock: PlannedClock, hardware: Hardware) -> None:
        self.rank, self.world = 0, world
        self._clock, self._hardware, self._line = clock, hardware, hardware.collective(world)
        self._free = 0.0

    @property
    def line(self) -> Line:
        """A collective by the bytes of the flat, without what each rank does beside it."""
        return self._line

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _issue(self, nbytes: int, copied: int, *alive: object) -> _Pending:
        begin = max(self._clock.now, self._free)
        self._free = begin + self._line(nbytes) + self._hardware.traffic(copied)
        return _Pending(self._clock, self._free, *alive)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> _Pending:
        as_it_is = shard.dtype == flat.dtype and self.world > 1
        return self._issue(flat.nbytes, 0 if as_it_is else shard.nbytes + flat.nbytes // self.world, flat, shard)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> _Pending:
        if self.world == 1:
            return self._issue(out.nbytes, 2 * out.nbytes)
        whole = isinstance(parts, torch.Tensor) and parts.dtype == out.dtype
        flat = parts if whole else torch.empty(layout.numel, dtype=out.dtype)
        nbytes = layout.numel * out.itemsize
        return self._issue(nbytes, 0 if whole else 2 * nbytes, flat, parts, out)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> _Pending:
        raise NotImplementedError("an engine's window has no such reduction")

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> _Pending:
        raise NotImplementedError("what is planned is AdamW's, which needs no whole matrices")

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = "world") -> None:
        raise NotImplementedError("nothing has values")

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError("nothing has values")
