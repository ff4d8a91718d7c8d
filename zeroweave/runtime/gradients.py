"""The accounting of gradients: every contribution enters exactly one reduction.

The life of a gradient: a forward *announces* that its backward will deliver it. The backward *delivers* it as a part
(slot, tensor). When nothing announced is missing the bucket is *complete*. In its turn the bucket is *issued*
(reduce-scattered) or, in a backward that does not reduce, *folded* into a local sum. *Settling* makes the result
usable: the window's first one is the gradient shard, later ones are added to it. The optimizer step *takes* it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import ReduceOp, Transport
from zeroweave.layout import SlotKey
from zeroweave.runtime.account import Account, Lend
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.reductions import Reductions


class Gradients:
    """Accounts of all trainable buckets, and the order of their reductions.

    `deliver` returns the buckets whose announced gradients are all there. With a schedule, a bucket is reduced once it
    is complete and next in the schedule; without one, at its turn, complete or not. `order` is the order that all ranks
    have agreed on.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transport: Transport,
        *,
        op: ReduceOp,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype,
        keep_targets: bool = False,
        lend: Lend | None = None,
    ) -> None:
        """`lend(numel, dtype)` gives memory for a gradient flat; see `CallGraphs.lend`."""
        self.settled = Gauge()
        """bytes of the gradient shards"""
        self._accounts = {b.id: Account(b, accumulate_dtype, self.settled, lend) for b in buckets if b.layout.trainable}
        self._targets: dict[int, torch.Tensor] = {}
        """bucket id -> where its results go; empty unless they are kept from set-up on, to measure what that costs"""
        if keep_targets:
            for bucket_id, account in self._accounts.items():
                bucket, dtype = account.bucket, reduce_dtype or account.bucket.dtype
                self._targets[bucket_id] = torch.empty(bucket.shard.numel(), dtype=dtype, device=bucket.device)
        self.flats = Gauge()
        """bytes of the gradient flats in flight at once"""
        self.reductions = Reductions(transport, op, reduce_dtype, self.flats)
        self.order: tuple[int, ...] = ()
        self.set_order(None)
        self.unreduced = False
        """True if a backward of the window is not reduced yet; equal on all ranks, even if it had no gradients"""
        self.local_peak = 0
        """bytes of the local sums at once, at most"""

    def restart_peaks(self) -> None:
        """Restarts the peaks of memory."""
        self.flats.restart()
        self.settled.restart()
        self.local_peak = self._local_bytes()

    @property
    def written(self) -> int:
        """Gradients so far that backwards wrote, or added, where they are reduced from: nothing copied them."""
        return sum(account.flat.collected + account.added for account in self._accounts.values())

    def _local_bytes(self) -> int:
        return sum(a.local.nbytes for a in self._accounts.values() if a.local is not None)

    def _look(self) -> None:
        """There may be more local sums than before."""
        self.local_peak = max(self.local_peak, self._local_bytes())

    def set_order(self, order: tuple[int, ...] | None) -> None:
        """The order of the reductions of one backward, on all ranks; None: the reverse of the layout's."""
        self.order = order or tuple(sorted(self._accounts, reverse=True))

    # ------------------------------------------------------------------ contributions
    def announce(self, parts: Iterable[SlotKey]) -> None:
        """A compiled backward will deliver these (bucket id, slot index)."""
        for bucket_id, slot in parts:
            self._accounts[bucket_id].announce(slot)

    def expect(self, parts: Iterable[SlotKey]) -> None:
        """The eager gradients of these (bucket id, slot index) are likely to come."""
        for bucket_id, slot in parts:
            if (account := self._accounts[bucket_id]).bucket.real[slot].requires_grad:
                account.expect(slot)

    def read(self, bucket_id: int, slot: int) -> None:
        """Eager code reads a parameter. By that a gradient may come, or none."""
        self._accounts[bucket_id].read(slot)

    def destination(self, bucket_id: int, slot: int) -> torch.Tensor | None:
        """Where a gradient that is delivered next may be written, of its shape and dtype; None: anywhere.

        There is such a tensor where the present backward reduces gradients in the dtype that they come in.
        """
        account = self._accounts[bucket_id]
        if self.unreduced or (self.reductions.dtype or account.bucket.dtype) != account.bucket.dtype:
            return None
        return account.destination(slot)

    def sum_of(self, bucket_id: int, slot: int) -> torch.Tensor | None:
        """The local sum, of the slot's shape, to which a gradient that is delivered next may be added; None: to none.

        To be asked for while the present backward does not reduce, or others before have not.
        """
        account = self._accounts[bucket_id]
        first = account.local is None
        found = account.sum_of(slot)
        if first and found is not None:
            self._look()
        return found

    def deliver(
        self,
        announced: Iterable[SlotKey],
        parts: Iterable[tuple[int, int, torch.Tensor | None]],
        made: Set[SlotKey] = frozenset(),
        reducing: bool = True,
    ) -> list[int]:
        """Contributions of the present backward, which may be `reducing`: (bucket id, slot index, gradient or None).

        `made`: (bucket id, slot index) of those whose memory no other tensor shares.

        `announced` are the (bucket id, slot index) that a compiled forward had announced for them. Returns the buckets
        that are complete now and were not before, by what was announced.
        """
        touched: dict[int, Account] = {}
        for bucket_id, slot in announced:
            account = touched[bucket_id] = self._accounts[bucket_id]
            account.came(slot)
        for bucket_id, slot, gradient in parts:
            account = touched[bucket_id] = self._accounts[bucket_id]
            if gradient is not None:
                account.add(slot, gradient, made=(bucket_id, slot) in made)
        return [bucket_id for bucket_id, account in touched.items() if account.newly_complete(reducing)]

    def deliver_eager(self, bucket_id: int, slot: int, gradient: torch.Tensor, reducing: bool = True) -> list[int]:
        """One contribution of the eager autograd engine; see `deliver`."""
        self._accounts[bucket_id].came_eagerly(slot)
        return self.deliver((), ((bucket_id, slot, gradient),), reducing=reducing)

    # ------------------------------------------------------------------ reductions
    def fold(self, buckets: Iterable[int]) -> None:
        """Adds the parts of a backward that does not reduce to the local sums.

        If a backward runs others inside it, a bucket is complete once for each of them. Each time its parts are added.
        """
        for account in map(self._accounts.__getitem__, buckets):
            first = account.local is None
            account.fold()
            if first:
                self._look()

    def issue(self, bucket_id: int) -> None:
        """Starts the reduction of what the bucket has now; missing slots count as zeros.

        A local sum is reduced in the dtype in which it was added up, unless `precision.reduce` sets another: to round
        the sum would lose more than to round each of its terms. All buckets of this backward are reduced in that dtype
        then, on all ranks, because another rank may have a local sum where this one has none.
        """
        account = self._accounts[bucket_id]
        bucket, like = account.bucket, account.bucket.flat
        layout = bucket.layout.inside
        out = self._targets.get(bucket_id) if account.shard is None and not bucket.layout.crosses else None
        if self.unreduced:
            like, out = torch.empty(0, dtype=account.dtype, device=bucket.device), None
        self.reductions.start(bucket_id, account.issue(), layout, like, account.settle, out=out)

    def cross(self, bucket_id: int) -> None:
        """Starts the reduction across groups of what has settled inside; does nothing if there is none."""
        account = self._accounts[bucket_id]
        layout = account.bucket.layout
        if (near := account.take_near()) is not None:
            self.reductions.start(bucket_id, near, layout.across, near, account.arrive, whole=layout.copies > 1)

    def settle_all(self) -> None:
        """The window's gradients are complete: all reductions are settled, inside and across replicas. Collective."""
        self.reductions.settle_all()
        for bucket_id in self.replicated:
            self.cross(bucket_id)
        self.reductions.settle_all()

    @property
    def replicated(self) -> tuple[int, ...]:
        """Buckets that are reduced across groups too, in the order in which all ranks do that."""
        return tuple(b for b in self.order if self._accounts[b].bucket.layout.crosses)

    @property
    def spread(self) -> tuple[int, ...]:
        """Buckets that are gathered across groups after their update, in the order of the layout."""
        return tuple(b for b, account in sorted(self._accounts.items()) if account.bucket.layout.replicas > 1)

    # ------------------------------------------------------------------ backward and window
    def unissued(self) -> tuple[int, ...]:
        """The buckets not yet reduced in this backward, in the agreed order."""
        return tuple(b for b in self.order if not self._accounts[b].issued)

    def is_unissued(self, bucket_id: int) -> bool:
        """True if the bucket is trained, and not yet reduced in this backward."""
        account = self._accounts.get(bucket_id)
        return account is not None and not account.issued

    def is_unused(self, bucket_id: int) -> bool:
        """True if the bucket is trained, and has had no gradient in this window."""
        account = self._accounts.get(bucket_id)
        return account is not None and not account.had_gradient

    def late(self) -> bytes:
        """A byte per trainable bucket, by id: 1 where gradients have come since its last reduction."""
        return bytes(bool(account.parts) for _, account in sorted(self._accounts.items()))

    def marked(self, flags: bytes) -> tuple[int, ...]:
        """The trainable buckets that are marked in such bytes, in the agreed order."""
        marks = dict(zip(sorted(self._accounts), flags, strict=True))
        return tuple(bucket for bucket in self.order if marks[bucket])

    def awaits_turn(self, bucket_id: int) -> bool:
        """True if the bucket was reported ready in this backward, and is not issued yet."""
        account = self._accounts[bucket_id]
        return account.reported and not account.issued

    def end_backward(self, reduced: bool = True) -> None:
        """Announced gradients that did not come count as zeros; the next backward reduces every bucket again.

        What came after its bucket's reduction goes with the next one.
        """
        self.unreduced = not reduced
        for account in self._accounts.values():
            account.end_backward()

    @property
    def accounts(self) -> Mapping[int, Account]:
        """Of the trainable buckets, by id."""
        return self._accounts

    def shard(self, bucket_id: int) -> torch.Tensor | None:
        """The settled gradient [numel / world] of the window; None where nothing was reduced."""
        return self._accounts[bucket_id].shard

    def shards(self) -> list[torch.Tensor]:
        """All settled gradients of the window, by bucket id."""
        return [a.shard for _, a in sorted(self._accounts.items()) if a.shard is not None]

    def take(self, bucket_id: int) -> torch.Tensor | None:
        """Hands the settled gradient over and forgets it, so that its memory goes with the caller's use."""
        return self._accounts[bucket_id].take()

    @torch.no_grad()
    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies all settled gradients by a 0-dim tensor, in the accumulation dtype."""
        for account in self._accounts.values():
            account.multiply(factor)

    @torch.no_grad()
    def write(self, bucket_id: int, slot: int, value: torch.Tensor) -> None:
        """Replaces this rank's fragment of one settled gradient by `value` [numel of the fragment]."""
        self._accounts[bucket_id].write(slot, value)

    def had_gradient(self) -> bytes:
        """A byte per parameter of the trainable buckets, by bucket id: 1 where this rank's window had a gradient.

        The parameters are those of all ranks: where a bucket's sharding group is one of several, each of these has its
        own, by the group's number, of which the others know nothing.
        """
        flags = bytearray()
        for _, account in sorted(self._accounts.items()):
            bucket, slots = account.bucket, range(len(account.bucket.layout.slots))
            for number in range(bucket.layout.groups):
                flags += bytes(number == bucket.number and slot in account.had_gradient for slot in slots)
        return bytes(flags)

    def absent(self, had_gradient: bytes) -> dict[int, frozenset[int]]:
        """The inverse of `had_gradient`: for each bucket the slots that no rank of its group had a gradient for."""
        result, start = {}, 0
        for bucket_id, account in sorted(self._accounts.items()):
            bucket, count = account.bucket, len(account.bucket.layout.slots)
            own = had_gradient[start + bucket.number * count :][:count]
            result[bucket_id] = frozenset(slot for slot, had in enumerate(own) if not had)
            start += bucket.layout.groups * count
        return result

    def reset(self) -> None:
        """Forgets the window: after the step, `zero_grad` or an exception. Waits for what is under way."""
        self.unreduced = False
        self.reductions.abort()
        for account in self._accounts.values():
            account.reset()
