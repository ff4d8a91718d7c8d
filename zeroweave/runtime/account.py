"""One bucket's gradients in the open window: those that are missing, those that have come, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from zeroweave._torch.foreach import foreach_add_
from zeroweave._torch.storages import contiguous_stride, reinterpreted, storage_use_count
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Parts, lay_out
from zeroweave.compile.destinations import may_add
from zeroweave.errors import EngineError, ParameterError, ZeroweaveError
from zeroweave.runtime.bucket import Bucket

_ONCE: Final = "compute with it in the model's forward only, or remove the hooks and use engine.gradients()"

Lend = Callable[[int, torch.dtype], torch.Tensor | None]


class GradientFlat:
    """The flat that a bucket's gradients are reduced from, where they are written right into it, in their dtype.

        lend      a compiled backward gets a slot's destination, before it runs
        came      the gradient is there, or one in other memory
        collect   what is not there yet is copied, and the flat goes into the reduction

    A gradient in other memory is an ordinary part. A bucket that has only those has no flat here. But a gradient that
    is all of its bucket, in memory that no other tensor shares, is the flat itself: reductions may write it. There is
    one for each reduction. Until that is issued it counts as what a backward computes with; see `Reductions`.
    """

    def __init__(self, bucket: Bucket, lend: Lend | None = None) -> None:
        self._bucket, self._lend = bucket, lend or (lambda numel, dtype: None)
        self._flat: torch.Tensor | None = None
        self._lent: dict[int, torch.Tensor] = {}
        """slot -> its destination, which may be written at any time"""
        self._there: set[int] = set()
        """slots whose gradient is at its destination"""
        self._whole: torch.Tensor | None = None
        """a gradient that is the flat"""
        self.collected = 0
        """gradients that went into reductions from where they were written"""

    def clear(self) -> None:
        """Forgets the flat. A tensor that views a part of it keeps its memory."""
        self._flat, self._lent, self._there, self._whole = None, {}, set(), None

    def lend(self, slot: int) -> torch.Tensor | None:
        """The destination of a slot, of its shape, to be written; None if it is lent or filled, or is not aligned.

        Kernels that were compiled for aligned memory would write elsewhere, and the result would be copied.
        """
        if slot in self._lent or slot in self._there or not self._bucket.is_aligned(slot):
            return None
        layout = self._bucket.layout
        there = layout.slots[slot]
        if self._flat is None:
            self._flat = self._lend(layout.numel, self._bucket.dtype)
            if self._flat is None:
                self._flat = torch.empty(layout.numel, dtype=self._bucket.dtype, device=self._bucket.device)
        view = self._lent[slot] = reinterpreted(self._flat, there.shape, contiguous_stride(there.shape), there.offset)
        return view

    def came(self, slot: int, gradient: torch.Tensor, made: bool = False) -> None:
        """The gradient of a slot is this from now on. `made`: True if no other tensor shares its memory."""
        self._whole = gradient if made and gradient.numel() == self._bucket.layout.numel else None
        if self._lent.pop(slot, None) is gradient:
            self._there.add(slot)
        else:
            self._there.discard(slot)

    @torch.no_grad()
    def collect(self, parts: Mapping[int, torch.Tensor]) -> Parts:
        """Returns one flat with all parts if some gradient was written into it, otherwise `parts` as they are.

        `parts`: the gradients that `came` was told of. They are returned as they are, too, if a destination is still
        lent: a reduction would read it while it may be written.
        """
        flat, there, lent, whole = self._flat, self._there, self._lent, self._whole
        self.clear()
        if whole is not None:
            self.collected += 1
            return whole.view(-1)
        if flat is None or lent or not there:
            return parts
        lay_out(flat, parts, self._bucket.layout, there)
        self.collected += len(there)
        return flat


class Account:
    """The account of `bucket`, whose gradients add up in `accumulate_dtype`, or in their own dtype if that is wider.

    `shards` counts the bytes of settled gradients.
    """

    def __init__(self, bucket: Bucket, accumulate_dtype: torch.dtype, shards: Gauge, lend: Lend | None = None) -> None:
        self.bucket, self._shards = bucket, shards
        self.flat = GradientFlat(bucket, lend)
        self._keeps_sum = lend is not None
        self._kept_sum: tuple[torch.UntypedStorage, int] | None = None
        """the memory of local sums, and how many owners it has between windows"""
        self.added = 0
        """gradients that backwards have added to local sums themselves"""
        self.shard: torch.Tensor | None = None
        """[numel / world] the reduced gradient of the window"""
        self._counted = 0
        self._near: torch.Tensor | None = None
        """[numel / group] what was reduced inside a group and not yet across groups"""
        self.dtype = torch.promote_types(accumulate_dtype, bucket.dtype)
        """in which gradients add up: never narrower than their own"""
        self.reset()

    def reset(self) -> None:
        """A window begins."""
        self._announced: dict[int, int] = {}
        """slot -> contributions of compiled backwards still to come"""
        self._expected: set[int] = set()
        """slots whose eager gradient is still to come"""
        self._read: set[int] = set()
        """slots that eager code has read, whose gradient may still come"""
        self._armed = False
        """True if anything was announced. An unannounced backward is complete only at its end"""
        self.parts: dict[int, torch.Tensor] = {}
        """contributions of this backward that have entered no reduction yet"""
        self._unhooked: dict[int, torch.Tensor] = {}
        """those whose sums hooks have yet to run on"""
        self._hooked: set[int] = set()
        """slots on whose gradients hooks have run in this backward"""
        self.flat.clear()
        self.local: torch.Tensor | None = None
        """[numel] the sum of backwards that did not reduce, laid out like the flat"""
        self._sums: list[torch.Tensor] = []
        """its slots"""
        self._near = None
        self._keep(None)
        self.had_gradient: set[int] = set()
        """slots"""
        self._fresh = False
        """True if a contribution has come that was not folded or issued yet"""
        self.reported = False
        """True if the bucket was reported complete in the present backward"""
        self.issued = False
        """True if it was reduced in the present backward"""

    # ------------------------------------------------------------------ contributions
    def announce(self, slot: int) -> None:
        """A compiled backward will contribute to the slot."""
        self._armed = True
        self._announced[slot] = self._announced.get(slot, 0) + 1

    def expect(self, slot: int) -> None:
        """The slot's eager gradient is likely to come."""
        self._armed = True
        self._expected.add(slot)

    def read(self, slot: int) -> None:
        """Eager code reads the slot: a gradient may follow, or none, as when it only asks for the dtype."""
        self._armed = True
        self._read.add(slot)

    def came(self, slot: int) -> None:
        """One announced contribution is there."""
        left = self._announced.get(slot, 0) - 1
        if left > 0:
            self._announced[slot] = left
        else:
            self._announced.pop(slot, None)

    def came_eagerly(self, slot: int) -> None:
        """The eager gradient is there."""
        self._expected.discard(slot)
        self._read.discard(slot)

    def destination(self, slot: int) -> torch.Tensor | None:
        """Where a contribution to the slot may be written, to be added then; of its shape. None: anywhere."""
        return None if slot in self.parts or self.local is not None else self.flat.lend(slot)

    def sum_of(self, slot: int) -> torch.Tensor | None:
        """The slot's local sum, for a contribution to be added to right now. None: it is an ordinary part.

        It is a part if matmuls cannot add to sums of this dtype, or if the slot is not aligned as compiled kernels
        require. It is a part after the bucket's reduction, too: another reduction has to follow then.
        """
        if self.issued or not may_add(self.bucket.dtype, self.dtype) or not self.bucket.is_aligned(slot):
            return None
        if self.local is None:
            self._sum_up(self._sum_memory().zero_())
        return self._sums[slot]

    def _sum_memory(self) -> torch.Tensor:
        """Memory [numel] for a local sum. If graphs know its address, it is that of the window before."""
        if self._kept_sum is not None and storage_use_count(self._kept_sum[0]) == self._kept_sum[1]:
            storage = self._kept_sum[0]
            made = torch.empty(0, dtype=self.dtype, device=self.bucket.device)
            return made.set_(storage, 0, (self.bucket.layout.numel,), (1,))
        made = torch.empty(self.bucket.layout.numel, dtype=self.dtype, device=self.bucket.device)
        if self._keeps_sum:
            storage = made.untyped_storage()
            self._kept_sum = storage, storage_use_count(storage) - 1  # without `made`
        return made

    def _sum_up(self, local: torch.Tensor) -> None:
        """`local` [numel] is the local sum from now on."""
        self.local, self._sums = local, self.bucket.views(local)

    def add(self, slot: int, gradient: torch.Tensor, made: bool = False) -> None:
        """Enters one contribution. `made`: no other tensor shares its memory.

        If `gradient` is the slot's local sum itself, the backward has added to it already, and it is only counted.
        """
        self.had_gradient.add(slot)
        self._fresh = True
        if self._sums and gradient is self._sums[slot]:
            self.added += 1
            return
        if slot in self._hooked:
            name = self.bucket.layout.slots[slot].name
            raise EngineError(f"a part of the gradient of {name!r} comes after its hooks have run: {_ONCE}")
        parts = self._unhooked if self.bucket.hooks(slot) else self.parts
        earlier = parts.get(slot)
        # out of place: a gradient may be a tensor that the graph still reads (a tangent, an activation)
        parts[slot] = gradient if earlier is None else earlier + gradient
        if parts is self.parts:
            self.flat.came(slot, parts[slot], made and earlier is None)

    @torch.no_grad()
    def _run_hooks(self) -> None:
        """Runs the program's hooks on the gradients of this backward; their results become parts."""
        unhooked, self._unhooked = self._unhooked, {}
        for slot, gradient in unhooked.items():
            made = gradient.clone()  # which hooks may write
            for hook in tuple((self.bucket.hooks(slot) or {}).values()):
                given = hook(made)
                if given is not None and (given.dtype, given.shape) != (made.dtype, made.shape):
                    name, wanted = self.bucket.layout.slots[slot].name, f"{made.dtype} {list(made.shape)}"
                    raise ParameterError(f"a hook of {name!r} must return None or {wanted}, as its gradient is")
                made = made if given is None else given
            earlier = self.parts.get(slot)
            self.parts[slot] = made if earlier is None else earlier + made
            self.flat.came(slot, self.parts[slot])
            self._hooked.add(slot)

    def newly_complete(self, reducing: bool) -> bool:
        """True once, when the last announced gradient has arrived. True again after these have been added up.

        A backward that reduces also waits for gradients that may still come, so that it reduces the bucket once. Other
        backwards add each gradient to the local sum at once and keep none, unless a hook waits for the whole gradient.
        """
        missing = self._announced or self._expected or (self._read if reducing else self._unhooked)
        if self.reported or missing or not (self._armed and self._fresh):
            return False
        self.reported = True
        return True

    # ------------------------------------------------------------------ reductions
    def fold(self) -> None:
        """Adds the parts of a backward that does not reduce to the local sum."""
        self._run_hooks()
        self.add_up()
        self.reported = self._fresh = False

    @torch.no_grad()
    def add_up(self) -> None:
        """Adds the parts to the local sum."""
        if not self.parts:
            return
        if self.local is None:
            local = self._sum_memory()
            self._sum_up(local)
            lay_out(local, self.parts, self.bucket.layout)
        else:
            foreach_add_([self._sums[slot] for slot in self.parts], list(self.parts.values()))
        self.flat.clear()
        self.parts.clear()

    def issue(self) -> Parts:
        """Hands over what the bucket has, to be reduced: its parts, or the local sum where it has one."""
        self._run_hooks()
        if self.local is not None:
            self.add_up()
            parts: Parts = self.local  # which is a flat already: nothing is copied
        else:
            parts = self.flat.collect(self.parts)
        self.parts, self.local, self._sums, self.issued, self._fresh = {}, None, [], True, False
        return parts

    def settle(self, result: torch.Tensor) -> None:
        """The window's first result becomes its gradient, and later ones are added.

        If the bucket is reduced across groups as well, results add up in the near sum instead.
        """
        if not self.bucket.layout.crosses:
            self.arrive(result)
        else:
            with torch.no_grad():
                self._near = result if self._near is None else self._near.to(self.dtype).add_(result)
            self._count()

    def take_near(self) -> torch.Tensor | None:
        """Hands the near sum over, to be reduced across groups, and forgets it; None: there is none."""
        near, self._near = self._near, None
        self._count()
        return near

    def arrive(self, result: torch.Tensor) -> None:
        """A result [numel / world] is the gradient, or is added to it."""
        if self.shard is None:
            self._keep(result)
        else:
            with torch.no_grad():
                self._keep(self.shard.to(self.dtype).add_(result))

    def end_backward(self) -> None:
        """Announced gradients that did not come count as zeros; the next backward reduces again."""
        self._run_hooks()
        if self.parts and not self.issued:
            raise ZeroweaveError(f"bucket {self.bucket.layout.name!r}: a gradient entered no reduction")
        self._announced.clear()
        self._expected.clear()
        self._read.clear()
        self._hooked.clear()
        if not self.parts:
            self.flat.clear()  # memory that was lent for gradients that were not wanted
        self.issued = self.reported = self._armed = False

    # ------------------------------------------------------------------ the settled gradient
    def take(self) -> torch.Tensor | None:
        """Hands the settled gradient over and forgets it."""
        shard = self.shard
        self._keep(None)
        return shard

    def _keep(self, shard: torch.Tensor | None) -> None:
        """It is the settled gradient from now on."""
        self.shard = shard
        self._count()

    def _count(self) -> None:
        before, self._counted = self._counted, sum(each.nbytes for each in (self.shard, self._near) if each is not None)
        self._shards.add(self._counted - before)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies the settled gradient by a 0-dim tensor."""
        if self.shard is not None:
            self._keep(self.shard.to(self.dtype).mul_(factor))

    def write(self, slot: int, value: torch.Tensor) -> None:
        """Replaces this rank's fragment of the slot by `value` [numel of the fragment]."""
        layout = self.bucket.layout
        if self.shard is None:
            raise EngineError(f"there is no gradient of {layout.slots[slot].name!r} to be replaced")
        shard = self.shard.to(self.dtype)
        self.bucket.fragment(shard, slot).copy_(value)
        self._keep(shard)
        self.had_gradient.add(slot)
