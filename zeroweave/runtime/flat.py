"""A flat at run time: storage that exists while it has holds.

resharded   the flat's storage has 0 bytes; the shard is all there is
gathering   the storage has its full size, the all-gather is under way (`unshard` of the first hold)
usable      the current stream has waited for the gather (`wait`)
lingering   no hold is left, but some tensor still views the flat; freed by a later `free`
standing    no hold is left, and it stays on purpose (`stay`): the next hold uses the values, and gathers nothing
expired     it stays, but its values are not good any more: the next hold gathers them, into the same memory

In a group of one rank the flat can be the shard's own memory (`is_shard`). Then nothing is gathered, copied or freed.

A flat may have a buffer (`assign`). Then it is gathered there, so that its gather takes the way that all ranks have
agreed on. A flat that is still there on this rank alone, because it is viewed, leaves: its content moves to ordinary
memory. Its views move with it, since they share the storage and not the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroweave._torch.storages import storage_use_count
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.registered_buffers import RegisteredBuffer
from zeroweave.comm.transport import Gatherer, Pending, Transport
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout


class Flat:
    """A flat [numel], gathered in `dtype` on `device`. Costs numel elements while not resharded.

    `source()`: what this rank has of it [numel / world], which `gatherer` gathers. Nothing is gathered where there are
    no elements. `gauge` counts the bytes of its storage.

    `shard` [numel], of that dtype and device: memory of which the flat is a second name; None: it has its own.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        gatherer: Gatherer,
        source: Callable[[], torch.Tensor],
        gauge: Gauge,
        shard: torch.Tensor | None = None,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self._gatherer, self._source, self._gauge = gatherer, source, gauge
        self.is_shard = shard is not None
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device) if shard is None else shard
        self.storage = self.flat.untyped_storage()
        # `.data` has its own version counter: a gather is no write to the parameters.
        self._target = self.flat.data
        if not self.is_shard:
            self.storage.resize_(0)
        self.holds = 0
        self.stays = False
        """True if it stands after its last hold, from its next gather on, which all ranks issue"""
        self.standing = False
        """True if the gathered values are good until they expire"""
        self._remains = False
        """True if its memory stays from its first gather on, even if its values expire"""
        self.gathers = 0
        """how many were issued"""
        self._pending: Pending | None = None
        self._adrift = False
        """True if a gather may be under way that cannot be waited for, after an exception such as Ctrl-C"""
        self._buffer: RegisteredBuffer | None = None
        """its buffer from the next gather on; None: ordinary memory"""
        self._at: RegisteredBuffer | None = None
        """its buffer now; None: ordinary memory, or none"""
        self._references = storage_use_count(self.storage)

    @property
    def resident(self) -> bool:
        """True if the storage has its full size (gathering, usable or lingering)."""
        return self.storage.nbytes() > 0

    @property
    def good(self) -> bool:
        """True if the next first hold has nothing to gather."""
        return self.is_shard or (self.standing and not self._adrift) or not self.layout.numel

    @property
    def viewed(self) -> bool:
        """True if a tensor other than its own views the flat."""
        return self._views() > 0

    def _views(self) -> int:
        return storage_use_count(self.storage) - self._references

    def may_be_read(self, handed_in: int) -> bool:
        """True if the storage may still be read, other than through `handed_in` views."""
        return self._is_shared or self._views() > handed_in

    @property
    def _is_shared(self) -> bool:
        """True if NumPy, or another process, shares the memory. It cannot be freed any more."""
        storage = self.storage
        return storage.device.type == "cpu" and (storage.is_shared() or not storage.resizable())

    def check_alone(self) -> None:
        """EngineError if NumPy or another process shares the memory, which they keep, and write without a trace."""
        if self._is_shared and not self.is_shard:
            raise EngineError(
                f"[ZW210] an array of NumPy, or another process, shares the memory of {self.layout.name!r}, where the "
                "next parameters are gathered. Copy before you make one of a parameter, or send it: "
                "parameter.detach().clone()"
            )

    def unshard(self) -> None:
        """Takes a hold; the first one starts the all-gather, unless the flat is standing.

        A lingering flat is gathered again: how long a view lives depends on garbage collection and may
        differ between ranks, but all ranks must issue the same collectives. Its values stay the same.

        If there is no memory, or the gather cannot be issued, no hold is taken: the next one gathers.
        """
        if not self.holds and not self.good:
            try:
                self._move_in()
                source, self._adrift = self._source(), True
                self._issued(self._gatherer.all_gather(self._target, source, self.layout))
            except BaseException:
                self.free()
                raise
        self.holds += 1

    def gather(self) -> None:
        """Starts the all-gather for existing holds, unless the flat is standing. The gather before was waited for.

        If it cannot be issued, the storage stays.
        """
        if not self.good:
            self._move_in()
            source, self._adrift = self._source(), True
            self._issued(self._gatherer.all_gather(self._target, source, self.layout))

    def _issued(self, gather: Pending) -> None:
        """Its gather is under way."""
        self._pending, self._adrift = gather, False
        self.gathers += 1
        self.standing = self.stays

    def stay(self, stays: bool) -> bool:
        """Sets whether it stands after its last hold from now on. False if it does not, and lingers.

        Equally on all ranks, as is `expire`: one of them alone would gather what the others do not.
        """
        before, self.stays = self.stays, stays
        return stays or not before or self.expire()

    def expire(self) -> bool:
        """What was gathered is not good any more: the next first hold gathers. False if it lingers.

        The memory of one that is to stay remains, so that it is found at its address again.
        """
        self.standing = False
        return self.holds > 0 or self.free()

    def remain(self) -> None:
        """Its memory stays at its address from the next gather on: graphs know it by that."""
        self._remains = True

    def let_go(self) -> bool:
        """As `expire`, and the memory is freed in any case. False if it lingers."""
        before = self.stays, self._remains
        self.stays = self._remains = False
        try:
            return self.expire()
        finally:
            self.stays, self._remains = before

    def assign(self, buffer: RegisteredBuffer | None) -> None:
        """Sets its buffer from its next gather on: equally on all ranks, and between two windows."""
        self._buffer = buffer

    def _move_in(self) -> None:
        """Gives the storage the memory of its buffer; content that lingers elsewhere is copied there."""
        if not self.resident:
            self._settle_in()
            self._gauge.add(self.layout.nbytes)
        elif self._at is not self._buffer:
            with torch.no_grad():
                content = self._target.clone()
                self._give_up()
                self._settle_in()
                self._target.copy_(content)

    def _settle_in(self) -> None:
        if self._buffer is None:
            self.storage.resize_(self.layout.nbytes)
        else:
            self._buffer.take(self)
            self._at = self._buffer

    def _give_up(self) -> None:
        """Frees the memory, in stream order."""
        self.storage.resize_(0)
        if self._at is not None:
            self._at.left()
            self._at = None

    def leave(self) -> None:
        """Moves to ordinary memory: another flat needs the buffer."""
        if self._at is None:
            return
        self.wait()
        self.storage.resize_(self.layout.nbytes)  # copies the content, in order of the current stream
        self._at.left()
        self._at = None

    def wait(self) -> None:
        """Makes the flat usable on the current stream."""
        if self._pending is not None:
            pending, self._pending, self._adrift = self._pending, None, True
            pending.wait()
            self._adrift = False

    def reshard(self, handed_in: int = 0) -> bool:
        """Drops a hold. The last one frees the storage in stream order, if it is not to stay; False if it lingers."""
        self.holds -= 1
        return self.holds > 0 or self.free(handed_in)

    def free(self, handed_in: int = 0) -> bool:
        """Frees the storage of a flat without holds. False if it may still be read, and lingers.

        One that is to stay is checked only. One that is adrift stays until a later gather has been waited for: the
        lost gather would write into memory that has another owner by then.

        `handed_in`: views that the caller knows of and promises not to read.
        """
        if not self.resident:
            return True
        self.wait()
        self.check_unchanged()
        if self.stays or self._remains or self.is_shard:
            return True
        if self._adrift or self.may_be_read(handed_in):
            return False
        self._give_up()
        self._gauge.add(-self.layout.nbytes)
        return True

    def check_unchanged(self) -> None:
        """Called before the storage is freed: raises if a value in it would be lost."""

    def drop(self) -> None:
        """Drops every hold."""
        while self.holds:
            self.reshard()
        self.expire()


class ShardedFlat(Flat):
    """The flat of a tensor `shard` [numel / world], on its device and in its dtype."""

    def __init__(self, layout: BucketLayout, shard: torch.Tensor, transport: Transport, gauge: Gauge) -> None:
        super().__init__(layout, shard.dtype, shard.device, transport, lambda: shard, gauge)
        self.shard = shard


class NearShard(Flat):
    """The part of a replicated bucket that its near ranks gather from. Costs numel / group elements for good.

    source [numel / world]  -- across replicas, once a change -->  near shard [numel / group]  -- inside -->  flat

    It is held for good: `gather` brings the shards' values unless they are there, after `expire`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport,
        gatherer: Gatherer,
        source: Callable[[], torch.Tensor],
    ) -> None:
        super().__init__(layout.across, dtype, device, gatherer, source, Gauge())
        self._transport, self._inside = transport, layout.inside
        self.storage.resize_(self.layout.nbytes)
        self.values = self.flat
        self.holds, self.stays = 1, True

    def gather(self) -> None:
        self.wait()
        super().gather()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        """Fills the bucket's `flat` [numel]; see `Gatherer`. `shard` is the source."""
        self.gather()
        self.wait()
        return self._transport.all_gather(flat, self._target, self._inside)
