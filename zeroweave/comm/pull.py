"""Reductions by pulling: each GPU reads its part of all ranks' gradients where they lie, and adds it up.

NCCL's kernel takes 24 of a GPU's multiprocessors for that. A matmul beside it, which has as many thread blocks as there
are multiprocessors, has to wait for some of them. The kernel here has four, and matmuls of the backward leave four
(`room`), so that neither waits for the other.

A gradient's flat lies in memory that the other GPUs reach, where compiled backwards write it. One that lies elsewhere
is copied there first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeroweave._torch.peers import Shared
from zeroweave._torch.storages import storage_use_count
from zeroweave.comm.around import Apart
from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.parts import lay_out, tensors_of
from zeroweave.comm.pending import Beside, Side, beside
from zeroweave.comm.pull_kernel import Pull
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD, BucketLayout


class PeerFlats:
    """Memory for gradients that other GPUs read: some tensors of one size, by number, which nobody views yet.

    The last one takes copies of what lies elsewhere. The others are lent; who has one, or a view of it, keeps it.
    `pads`: what ranks meet by. It is all there as long as this is.
    """

    def __init__(self, memory: Sequence[Shared], pads: Shared) -> None:
        self._memory: tuple[Shared, ...] = (*memory, pads)
        self._storages = [each.tensor.untyped_storage() for each in memory]
        self._alone = [storage_use_count(storage) for storage in self._storages]
        self._numbers = {each.tensor.data_ptr(): number for number, each in enumerate(memory)}
        self.nbytes = memory[0].tensor.nbytes
        """of each"""

    def close(self) -> None:
        """Gives the memory back, when nothing is under way; nothing fits here any more."""
        self._memory, self._storages, self.nbytes = (), [], 0
        self._numbers.clear()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """One that nobody has, as a 1-D tensor; None where all are lent, which delays nobody: gradients are copied."""
        for number in range(self.staging):
            if storage_use_count(self._storages[number]) == self._alone[number]:
                return self.view(number, numel, dtype)
        return None

    @property
    def staging(self) -> int:
        """The number of the one for copies. Each use comes behind the one before, on the stream that copies."""
        return len(self._storages) - 1

    def view(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of one of them, 1-D."""
        return self._memory[number].tensor[: numel * dtype.itemsize].view(dtype)

    def number(self, flat: torch.Tensor) -> int | None:
        """Which of them this is; None: it lies elsewhere."""
        return self._numbers.get(flat.data_ptr())


class _Noted:
    """A reduction under way, which the ledger knows as collective number `count`."""

    __slots__ = ("_beside", "_count", "_ledger")

    def __init__(self, beside: Beside, ledger: Ledger) -> None:
        self._beside, self._ledger, self._count = beside, ledger, ledger.count

    def wait(self) -> None:
        self._ledger.waits(self._count)
        self._beside.wait()

    def over(self, clock: Clock) -> Mark:
        return self._beside.over(clock)


class PulledReductions(Apart):
    """A transport that reduces buckets of `least` bytes and more by `pulls`, by dtype; all else is `inner`'s.

    Buckets that do not fit into one of `flats` are the inner one's, too, so that all ranks decide alike. The average is
    computed in float32, where nothing overflows that the result has room for: both ways to average give the same.
    `side`: where kernels run, in the order of their issue; None on a CPU, which has no other order.
    """

    def __init__(
        self,
        inner: Transport,
        flats: PeerFlats,
        pulls: Mapping[torch.dtype, Pull],
        least: int,
        ledger: Ledger,
        side: Side | None,
    ) -> None:
        super().__init__(inner)
        self._flats, self._pulls, self._least = flats, pulls, least
        self._ledger, self._side = ledger, side

    def pulls(self, layout: Spread, dtype: torch.dtype) -> bool:
        """Is this bucket reduced so? By what all ranks know."""
        nbytes = layout.numel * dtype.itemsize
        fits = self._least <= nbytes <= self._flats.nbytes
        return fits and dtype in self._pulls and layout.group == WORLD and min(layout.chunks) == max(layout.chunks)

    def flat(self, layout: Spread, dtype: torch.dtype) -> torch.Tensor:
        lent = self._flats.lend(layout.numel, dtype) if self.pulls(layout, dtype) else None
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
        with beside(self._side):
            number = None
            if isinstance(parts, torch.Tensor) and parts.dtype == out.dtype:
                number = self._flats.number(parts)
            if number is None:
                number = self._flats.staging
                lay_out(self._flats.view(number, layout.numel, out.dtype), parts, layout)
            nbytes = layout.numel * out.itemsize
            self._ledger.record("reduce_scatter", layout.id, dtype_name(out.dtype), nbytes, "world by pulling")
            self._pulls[out.dtype](out, layout.place(self.rank) * len(out), number)
        alive = out, *tensors_of(parts)
        return _Noted(Beside() if self._side is None else self._side.pending(*alive), self._ledger)
