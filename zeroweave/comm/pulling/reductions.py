"""Reductions by pulling: each GPU reads its part of all ranks' gradients where they lie, and adds it up.

NCCL's kernel takes 24 of a GPU's multiprocessors for that. A matmul beside it, which has as many thread blocks as there
are multiprocessors, has to wait for some of them. The kernel here has four, and matmuls of the backward leave four
(`room.py`), so that neither waits for the other.

A gradient's flat lies in memory that the other GPUs reach, where compiled backwards write it. One that lies elsewhere
is copied there first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final
from weakref import ref

import torch

from zeroweave._torch.peers import Shared
from zeroweave._torch.storages import storage_use_count
from zeroweave.comm.around import Apart
from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.parts import lay_out, tensors_of
from zeroweave.comm.pending import Beside, Side, beside
from zeroweave.comm.pulling.kernel import Pull
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD, BucketLayout

FLATS: Final = 2
"""One is written while the one before is reduced."""


class _Noted:
    """A reduction under way, which the ledger knows as collective number `count`."""

    __slots__ = ("__weakref__", "_beside", "_count", "_ledger", "waited")

    def __init__(self, beside: Beside, ledger: Ledger) -> None:
        self._beside, self._ledger, self._count = beside, ledger, ledger.count
        self.waited = False

    def wait(self) -> None:
        self._ledger.waits(self._count)
        self._beside.wait()
        self.waited = True

    def reach(self) -> None:
        """The current stream goes on behind it, and somebody else will wait for it."""
        self._beside.reach()

    def over(self, clock: Clock) -> Mark:
        return self._beside.over(clock)


class PeerFlats:
    """Memory for gradients that other GPUs read: some tensors of one size, by number, which nobody views yet.

    One is lent to be written until it is reduced from, which nobody may do with what he has of it then: in its turn
    it is lent again, to be written when the kernel that reads it is over. All but one may be lent and not reduced from
    yet. So there is always one for gradients that lie elsewhere and are copied. Who has a view of one that was lent,
    and never reduced from, keeps it: no other gradient gets that.

    `pads`: what ranks meet by, and `gone`, int32 [1]: what tells kernels that others will not come. All of it is there
    as long as this is.
    """

    def __init__(self, memory: Sequence[Shared], pads: Shared, gone: torch.Tensor) -> None:
        self._memory: tuple[Shared, ...] = (*memory, pads)
        self._storages = [each.tensor.untyped_storage() for each in memory]
        self._alone = [storage_use_count(storage) for storage in self._storages]
        self._numbers = {each.tensor.data_ptr(): number for number, each in enumerate(memory)}
        self._lent: set[int] = set()
        """numbers that were not reduced from since"""
        self._flying: dict[int, ref[_Noted]] = {}
        """number -> the last reduction from it, oldest first; one that nobody will wait for any more is none"""
        self.give_up: Callable[[], object] = partial(gone.fill_, 1)
        """ends kernels that wait for other ranks, whose results nobody needs any more; it keeps nothing else of this"""
        self.nbytes = memory[0].tensor.nbytes
        """of each"""

    def close(self, failed: bool = False) -> None:
        """Gives the memory back; nothing fits here any more. What is under way ends first.

        `failed`: the other ranks may be anywhere, and what is under way is given up.
        """
        if failed:
            self.give_up()
        if self._memory and (device := self._memory[0].tensor.device).type == "cuda":
            torch.cuda.synchronize(device)
        self._memory, self._storages, self.nbytes = (), [], 0
        self._numbers.clear()
        self._flying.clear()
        self._lent.clear()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """One to be written on the current stream, 1-D; None where another one is lent, and gradients are copied."""
        self._lent = {number for number in self._lent if not self._is_free(number)}
        number = self._next()
        if number is None or len(self._lent) >= len(self._storages) - 1:
            return None
        if (flight := self._flight(number)) is not None:
            flight.reach()
            del self._flying[number]
        self._lent.add(number)
        return self.view(number, numel, dtype)

    def for_copies(self) -> int:
        """The number of one to be written on the stream that reduces: there it comes behind the kernel that reads it.

        Nothing else has it from here on.
        """
        number = self._next()
        if number is None:  # whoever has views of one that was reduced from has nothing of them any more
            number = next(n for n in range(len(self._storages)) if n not in self._lent)
        self._lent.discard(number)  # it was given up
        return number

    def _next(self) -> int | None:
        """One that is free, or else that was reduced from first, and somebody will wait for that; None: neither."""
        free = next((n for n in range(len(self._storages)) if self._flight(n) is None and self._is_free(n)), None)
        return next((n for n in self._flying if self._flight(n) is not None), None) if free is None else free

    def _is_free(self, number: int) -> bool:
        """Has nobody a view of it?"""
        return storage_use_count(self._storages[number]) == self._alone[number]

    def _flight(self, number: int) -> _Noted | None:
        """The reduction from it that somebody will wait for."""
        found = self._flying[number]() if number in self._flying else None
        return None if found is None or found.waited else found

    def reduces(self, number: int, flight: _Noted) -> None:
        """It is reduced from."""
        self._lent.discard(number)
        self._flying.pop(number, None)
        self._flying[number] = ref(flight)

    def view(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of one of them, 1-D."""
        return self._memory[number].tensor[: numel * dtype.itemsize].view(dtype)

    def number(self, flat: torch.Tensor) -> int | None:
        """Which of them this is; None: it lies elsewhere."""
        return self._numbers.get(flat.data_ptr())


class PulledReductions(Apart):
    """A transport that reduces buckets by `pulls`, which are by dtype; all else is `inner`'s.

    Buckets that do not fit into one of `flats` are the inner one's, too, so that all ranks decide alike. The average is
    computed in float32, where nothing overflows that the result has room for: both ways to average give the same.
    `side`: where kernels run, in the order of their issue; None on a CPU, which has no other order.
    """

    def __init__(
        self,
        inner: Transport,
        flats: PeerFlats,
        pulls: Mapping[torch.dtype, Pull],
        ledger: Ledger,
        side: Side | None,
    ) -> None:
        super().__init__(inner)
        self.flats, self._pulls = flats, pulls
        self._ledger, self._side = ledger, side

    def pulls(self, layout: Spread, dtype: torch.dtype) -> bool:
        """Is this bucket reduced so? By what all ranks know."""
        nbytes = layout.numel * dtype.itemsize
        fits = nbytes <= self.flats.nbytes and dtype in self._pulls and layout.group == WORLD
        return fits and min(layout.chunks) == max(layout.chunks) and layout.chunks[0] * dtype.itemsize % 16 == 0

    def flat(self, layout: Spread, dtype: torch.dtype) -> torch.Tensor:
        lent = self.flats.lend(layout.numel, dtype) if self.pulls(layout, dtype) else None
        return self._inner.flat(layout, dtype) if lent is None else lent

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._launch(self._inner)
        return self._inner.all_gather(flat, shard, layout)

    @torch.no_grad()
    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        if not self.pulls(layout, out.dtype):
            self._launch(self._inner)
            return self._inner.reduce_scatter(out, parts, layout, op)
        self._launch(None)
        number = None
        if isinstance(parts, torch.Tensor) and parts.dtype == out.dtype:
            number = self.flats.number(parts)
        with beside(self._side):
            if number is None:
                number = self.flats.for_copies()
                lay_out(self.flats.view(number, layout.numel, out.dtype), parts, layout)
            nbytes = layout.numel * out.itemsize
            self._ledger.record("reduce_scatter", layout.id, dtype_name(out.dtype), nbytes, "world by pulling")
            self._pulls[out.dtype](out, layout.place(self.rank) * len(out), number)
        alive = out, *tensors_of(parts)
        flight = _Noted(Beside() if self._side is None else self._side.pending(*alive), self._ledger)
        self.flats.reduces(number, flight)
        return flight
