"""A bucket at run time: a flat, and the real parameters that view it.

A shard costs numel / world elements for good (float32 where trained), a flat numel elements while it is not resharded.
In a group of one rank both are the same memory where they can be. Where the shard lives is told in `runtime.shard`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import nn
from torch.autograd.graph import increment_version

from zeroweave._torch.storages import marks, owners, storage_key, storage_use_count, versions, view_key
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.comm.transport import Transport
from zeroweave.errors import ParameterError
from zeroweave.layout import BucketLayout, SlotKey
from zeroweave.parameters.stub import Hooks
from zeroweave.runtime.flat import Flat, NearShard
from zeroweave.runtime.shard import Shard
from zeroweave.schedule.build import Schedule


def write_error(names: str) -> str:
    """The error message for parameters that were written in place."""
    return (
        f"[ZW204] {names} written in place during a call: the write would be lost with the next gather; "
        "write parameters inside `with engine.full_parameters():`"
    )


class Bucket(Flat):
    """One bucket of this rank. `real[i]` is the Parameter that views slot i of the flat.

    The real parameters keep shape, dtype and stride while the storage is freed; PyTorch dies on a read
    then, so code that computes with them holds the bucket (`unshard`, `wait`, …, `reshard`). One that user code
    refers to for longer (`ctx.weight = weight`) stays readable until its values change; then it is retired, and
    another Parameter takes its place in `real`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        transport: Transport,
        flats: Gauge,
        home: Shard,
        device: torch.device,
        doubt: Callable[[str, torch.Tensor], bool] = lambda names, altered: False,
    ) -> None:
        """`dtype`: of the computation, in which the values are gathered.

        `doubt(names, altered)` queues what `altered()` found after an operator that may write, to be read at the end of
        the call. False if no call is under way.

        The shard of trainable parameters has at least float32: it is the optimizer's master, and rounded when
        it is gathered. So nothing is kept twice, and the optimizer has nothing to round.
        """
        self.home = home
        own = home.source if home.can_be_flat(layout.world) else None
        self.near: NearShard | None = None
        """where the ranks of a replica gather from; None: the bucket is not replicated"""
        if layout.replicas > 1:
            self.near = NearShard(layout, dtype, device, transport, home.gatherer, lambda: home.source)
        super().__init__(layout, dtype, device, self.near or home.gatherer, lambda: home.source, flats, own)
        self.id = layout.id
        self.rank = layout.group_rank(transport.rank)
        """this rank's number in the bucket's sharding group"""
        self.number = layout.number(transport.rank)
        """which of the groups of that name it is in, which owns these parameters"""
        self.copy = layout.copy(transport.rank)
        """which of the copies of its shard this rank has"""
        if not self.is_shard:
            self.storage.resize_(layout.nbytes)  # for as long as views of it are made
        # `.data` gives each parameter its own version counter, so that a write to one is seen and named.
        self.real = [nn.Parameter(view.data, requires_grad=layout.requires_grad) for view in self.views(self.flat)]
        if not self.is_shard:
            self.storage.resize_(0)
        self._key = storage_key(self.flat)
        self.generation = 0
        """how often the values of the shard have changed"""
        self._marks = marks(self.real)
        self._doubt = doubt
        self._references = storage_use_count(self.storage)
        self._shown = False
        self._own: dict[bool, list[int]] = {}
        self._retire: Callable[[str, nn.Parameter], nn.Parameter] = lambda name, parameter: parameter
        self._hooks: Mapping[str, Hooks] = {}

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.flat.device

    @property
    def shard(self) -> torch.Tensor:
        """The master [numel / world], in its home memory."""
        return self.home.master

    def values(self) -> torch.Tensor:
        """The shard [numel / world] on the device: itself, or a copy where it lives in host memory."""
        self.still()
        return self.home.values()

    def put(self, values: torch.Tensor) -> None:
        """Overwrites the shard by values on the device, which are not written any more."""
        self.still()
        self.home.put(values)
        self.rewritten()

    def gather_across(self) -> None:
        """Starts to bring the shards' values to all replicas, if they have changed. Collective."""
        if self.near is not None:
            self.near.gather()

    def still(self) -> None:
        """The shard may be written: no gather across replicas reads it."""
        if self.near is not None:
            self.near.wait()

    def rewritten(self) -> None:
        """The shard was written, on all ranks alike: it is gathered across replicas again."""
        if self.near is not None:
            self.near.expire()

    def part(self) -> None:
        """The program may write the flat. Until `unite`, `values` are those of now, even if it is the shard."""
        if self.is_shard:
            self.home.part()

    def unite(self, restore: bool) -> None:
        """The program writes no more. `restore`: what it has written into a flat that is the shard is undone."""
        if self.is_shard:
            self.home.unite(restore)

    def attach(self, retire: Callable[[str, nn.Parameter], nn.Parameter], hooks: Mapping[str, Hooks]) -> None:
        """Called once, by the code that shows the real parameters.

        `retire(name, parameter)` makes all references to one refuse, and returns the Parameter that takes its place.
        `hooks`: the program's, by the names of parameters.
        """
        self._retire, self._hooks = retire, hooks

    def hooks(self, slot: int) -> Hooks | None:
        """The hooks that the program has registered on a parameter, if there are any."""
        return self._hooks.get(self.layout.slots[slot].name) if self._hooks else None

    def note_shown(self, shown: bool) -> None:
        """The modules show the real parameters from now on, or do not.

        References to them that exist when either happens for the first time are the engine's own, for good.
        """
        if shown not in self._own:
            self._own[shown] = owners(self.real)
        self._shown = shown

    def referenced(self) -> list[int]:
        """The slots whose real parameters are referred to from outside the engine."""
        own, now = self._own.get(self._shown), owners(self.real)
        if own is None or now == own:
            return []
        return [i for i, (count, most) in enumerate(zip(now, own, strict=True)) if count > most]

    def may_be_read(self, handed_in: int) -> bool:
        return super().may_be_read(handed_in) or bool(self.referenced())

    @torch.no_grad()
    def altered(self) -> torch.Tensor:
        """[2], int64, on the device: 1 if this rank wrote its part since the gather, else 0; and one place where."""
        self.wait()
        own, sent = self.slice(self._target), self.home.rounded()
        differs, index = ((own != sent) & ((own == own) | (sent == sent))).max(0)  # NaN are equal
        return torch.stack((differs.long(), index + self.layout.shard_range(self.rank)[0]))

    def check_unchanged(self) -> None:
        """Raises if a parameter was written in place (the next gather would lose it), frozen or unfrozen.

        An operator counts as one that writes where PyTorch cannot know better. So this rank's values decide. They are
        compared on the device, and during a call read together at its end. A write into the part of another rank is
        found by that rank. Where the flat is the shard, no gather follows, and a write is as one without an engine.
        """
        if (now := marks(self.real)) == self._marks:
            return
        if written := self._changed(now, 0):
            self.accept_writes()
            loses = self.layout.shard_numel and not self.is_shard
            if loses and not self._doubt(written, altered := self.altered()) and altered[0]:
                raise ParameterError(write_error(written))
        if moved := self._changed(now, 1):
            for p, view in zip(self.real, self.views(self.flat), strict=True):
                p.data = view.data
            self.accept_writes()
            raise ParameterError(
                f"[ZW204] the data of {moved} was replaced by another tensor during a call; write values "
                "with `copy_` inside `with engine.full_parameters():`"
            )
        if frozen := self._changed(now, 2):
            for p, (_, _, on) in zip(self.real, self._marks, strict=True):
                p.requires_grad_(on)
            raise ParameterError(
                f"[ZW204] requires_grad of {frozen} changed during a call: set it before the forward, between engine "
                "calls"
            )

    def toggle(self, slot: int, on: bool) -> None:
        """The program wants gradients of a trained parameter from now on, or does not."""
        self._marks[slot] = (*self._marks[slot][:2], self.real[slot].requires_grad_(on).requires_grad)

    def _changed(self, now: list[tuple[int, int, bool]], which: int) -> str:
        """The names of the parameters of which this one of their marks has changed."""
        pairs = zip(self.layout.slots, now, self._marks, strict=True)
        return ", ".join(repr(slot.name) for slot, a, b in pairs if a[which] != b[which])

    def accept_writes(self) -> None:
        """Writes until now are no error any more."""
        now = zip(versions(self.real), self._marks, strict=True)
        self._marks = [(known, self._key, on) for known, (_, _, on) in now]

    @property
    def written(self) -> bool:
        """True if a parameter was written in place since the last `renew`."""
        return versions(self.real) != [known for known, _, _ in self._marks]

    def renew(self) -> None:
        """The shard was written: values saved for a backward before, or kept, are out of date."""
        for index in self.referenced():
            self.real[index] = self._retire(self.layout.slots[index].name, self.real[index])
        increment_version(self.real)
        self.generation += 1
        self.accept_writes()
        if self.standing:
            self.expire()

    def forget_strays(self, holds: int) -> bool:
        """Leaves it so many holds, and no gradients. True if there were others.

        After Ctrl-C a hold or a gradient may be there without its note: then no other code can drop it.
        """
        left = [p for p in self.real if p.grad is not None]
        for p in left:
            p.grad = None
        more, self.holds = self.holds > holds, holds
        return more or bool(left)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The slots of a tensor [numel] that is laid out like this bucket's flat."""
        return [flat.narrow(0, s.offset, s.numel).view(s.shape) for s in self.layout.slots]

    def is_aligned(self, slot: int) -> bool:
        """True if a slot begins, in a flat of this dtype, where compiled code may write a matrix."""
        return self.layout.slots[slot].offset * self.dtype.itemsize % 16 == 0

    def slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part [numel / world] of a tensor that is laid out like the flat."""
        start, stop = self.layout.shard_range(self.rank)
        return flat[start:stop]

    def fragment(self, shard: torch.Tensor, slot: int) -> torch.Tensor:
        """The part of a slot in a tensor [numel / world] that is laid out like the shard; may be empty."""
        part = self.layout.fragment(slot, self.rank)
        return shard[part.start : part.start + part.numel]


class Directory:
    """Finds the bucket and slot of a parameter by name, and of a tensor by (storage, offset)."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.slots: dict[str, SlotKey] = {}
        """by the parameter's name"""
        self._bucket: dict[int, Bucket] = {}
        self._slot: dict[tuple[int, int], int] = {}
        self._real: dict[int, tuple[list[nn.Parameter], int, SlotKey]] = {}
        """what a real parameter's `id` was at first: a hint, because most tensors that are looked for are real ones"""
        for bucket in buckets:
            self._bucket[storage_key(bucket.flat)] = bucket
            for index, slot in enumerate(bucket.layout.slots):
                key = self.slots[slot.name] = bucket.id, index
                self._slot[bucket.id, slot.offset] = index
                self._real[id(bucket.real[index])] = bucket.real, index, key

    def bucket(self, tensor: torch.Tensor) -> Bucket | None:
        """The bucket whose flat `tensor` views; None for every other tensor, and for those without storage."""
        return self._bucket.get(storage_key(tensor))

    def covering(self, tensor: torch.Tensor) -> SlotKey | None:
        """The slot in which a view of a flat begins."""
        bucket = self.bucket(tensor)
        if bucket is None:
            return None
        offset = int(tensor.storage_offset())
        return bucket.id, max(i for i, slot in enumerate(bucket.layout.slots) if slot.offset <= offset)

    def find(self, tensor: torch.Tensor) -> SlotKey | None:
        """The slot that a tensor views; slot index -1 where it is not one whole slot of its flat."""
        if (hint := self._real.get(id(tensor))) is not None and hint[0][hint[1]] is tensor:
            return hint[2]
        if (bucket := self._bucket.get(storage_key(tensor))) is None:
            return None
        slot = self._slot.get((bucket.id, int(tensor.storage_offset())), -1)
        if slot >= 0 and bucket.layout.slots[slot].numel != tensor.numel():
            slot = -1
        return bucket.id, slot


def assign_buffers(buckets: Mapping[int, Bucket], registered: RegisteredBuffers, schedule: Schedule | None) -> None:
    """Assigns each bucket the registered buffer that this schedule gives it, for all gathers.

    Collective, between windows. All ranks have agreed on the schedule, and without one no bucket has a buffer. So
    how a bucket is gathered follows from what all ranks know, not from the order of calls, nor from the views of a flat
    that are left on one rank.
    """
    numbers, sizes = ({}, {}) if schedule is None else (schedule.registered_buffers, schedule.registered_sizes)
    there = registered.fit(sizes)
    for bucket_id, bucket in buckets.items():
        bucket.assign(there.get(numbers[bucket_id]) if bucket_id in numbers else None)


class Lingering:
    """Which of these buckets linger."""

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self._buckets = buckets
        self._lingering: set[int] = set()

    def reshard(self, bucket: int) -> None:
        """Drops a hold of the bucket."""
        if not self._buckets[bucket].reshard():
            self._lingering.add(bucket)

    def sweep(self) -> None:
        """Frees the flats that are not viewed any more."""
        if not self._lingering:
            return
        for bucket in sorted(self._lingering):
            if self._buckets[bucket].holds or self._buckets[bucket].free():
                self._lingering.discard(bucket)

    def stay(self, buckets: Collection[int]) -> None:
        """These stay gathered from one window to the next, and no others. Equally on all ranks, between windows."""
        for bucket, each in sorted(self._buckets.items()):
            if not each.stay(bucket in buckets):
                self._lingering.add(bucket)

    def expire(self, buckets: Iterable[int] | None = None) -> None:
        """These buckets, by default all, are gathered again when they are needed. Equally on all ranks."""
        for bucket in sorted(self._buckets if buckets is None else buckets):
            if not self._buckets[bucket].expire():
                self._lingering.add(bucket)

    def let_go(self) -> None:
        """As `expire` for all, and all memory is freed. Equally on all ranks."""
        for bucket, each in sorted(self._buckets.items()):
            if not each.let_go():
                self._lingering.add(bucket)

    def gather_again(self) -> None:
        """Gathered values differ from the shards: holders see those of the shards from now on. Collective."""
        self.expire()
        for _, bucket in sorted(self._buckets.items()):
            if bucket.holds:
                bucket.gather()
                bucket.wait()

    def wait(self) -> None:
        """Gathers that are under way are waited for: what stays is gathered for the next window at a window's end."""
        for bucket in self._buckets.values():
            bucket.wait()

    def viewed(self) -> bytes:
        """A byte per bucket, by id: 1 where some tensor of this rank still views its flat."""
        self.sweep()
        return bytes(bucket.viewed for _, bucket in sorted(self._buckets.items()))

    def rewrite(self, viewed: bytes) -> None:
        """Gathers the buckets marked in `viewed`, which all ranks have agreed on, whose shards have new values.

        A view that user code keeps shows them then, as one of an ordinary parameter does.
        """
        for (bucket, each), marked in zip(sorted(self._buckets.items()), viewed, strict=True):
            if marked:
                each.unshard()
                each.wait()
                self.reshard(bucket)


class SavedViews:
    """The views of flats that a compiled forward has just saved, until autograd asks what becomes of each.

    A view is identified by its slot, or by its address if it is not one whole slot.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def add(self, tensor: torch.Tensor, slot: SlotKey) -> None:
        """One more, of `slot`."""
        self._counts[_key(tensor, slot)] += 1

    def take(self, tensor: torch.Tensor, slot: SlotKey) -> bool:
        """True if it is one of them. Each is asked for once."""
        key = _key(tensor, slot)
        if not (left := self._counts.get(key, 0)):
            return False
        self._counts[key] = left - 1
        return True

    def clear(self) -> None:
        """The call has ended: no view is asked for any more."""
        self._counts.clear()


def _key(tensor: torch.Tensor, slot: SlotKey) -> tuple[int, int]:
    return slot if slot[1] >= 0 else view_key(tensor)
