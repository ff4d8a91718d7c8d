"""What crosses links that are not there: collectives of ranks, and copies between the device and host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zeroweave.comm.transport import Messages, Parts, ReduceOp, Spread
from zeroweave.layout import ACROSS, INSIDE, WORLD, BucketLayout
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.meter import Lane, Meter, Passed, PlannedClock
from zeroweave.runtime.copies import CopyStream


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

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.wait()

    def finish(self) -> None:
        self._clock.reach(self._lane.now)
