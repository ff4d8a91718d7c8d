"""Where each parameter is stored: buckets, slots, shards and fragments. Integers only, no torch.

A *bucket* is a group of parameters of one dtype, sharding group and `requires_grad` that are gathered and
reduced together. Its *flat* is a 1-D buffer of `numel` elements:

    | slot 0 | gap | slot 1 | slot 2 | gap | ... | slot k | padding |
    |<----- shard of rank 0 ----->|<----- shard of rank 1 ----->| ...

Each *slot* is one parameter's range of the flat and starts at a multiple of 128 bytes. The flat is padded so that the
shards of all ranks are equal and start at multiples of 128 bytes too. A slot may span several shards; the
part of it inside one rank's shard is a *fragment*. What belongs to no slot (gaps and padding) is always
zero, so that norms and overflow checks may read whole shards.

A *sharding group* is a name for the ranks that share a bucket. Those of "world" are all ranks. Of any other name there
are `groups` groups, in which the same bucket holds different parameters, as expert parallelism has it: rank r of the
engine is rank `r // groups` of group number `r % groups`.

Where parameters are *replicated*, all ranks share a bucket, but only `world / replicas` consecutive ranks gather it
together: rank r has shard r of

    | replica 0: rank 0 | replica 1: rank 2 | replica 0: rank 1 | replica 1: rank 3 |      (4 ranks, 2 replicas)
    |<--- near shard of ranks 0 and 2 ----->|<--- near shard of ranks 1 and 3 ----->|

in that order, so that the ranks of equal number in all replicas together have one part of the flat, their *near shard*.
They gather it from their shards (`across`), and the ranks of a replica gather the flat from near shards (`inside`).

Where shards are *copied*, `world` consecutive ranks share a bucket, and each of the `copies` groups of them has all of
it. The ranks of equal number in all groups have the same shard, and reduce its gradient among themselves (`across`).

All counts and offsets are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

ALIGN_BYTES = 128
"""Slots and shards start at multiples of this: a full cache line, and what vector loads and NCCL like."""

GROUP_MARK = "@"
"""Between a parameter's name and the number of the sharding group that it belongs to."""

WORLD = "world"
"""The sharding group of all ranks."""

INSIDE = "inside"
"""The sharding groups of consecutive ranks that gather a replicated bucket together."""

ACROSS = "across"
"""The sharding groups of the ranks of equal number in all replicas."""

NAME_SEPARATOR = ":"
"""Between a bucket's base name (a module path) and the suffixes that distinguish its siblings."""

SlotKey = tuple[int, int]
"""Bucket id, slot index."""


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of one distinct parameter (a tied one appears once).

    `block` is the qualified name of the block that the parameter belongs to, or None. `group` names the
    sharding group. `itemsize` is in bytes and follows from `dtype`. `together`: those with equal numbers are next
    to each other in a bucket, lower ones first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    requires_grad: bool
    block: str | None
    group: str = WORLD
    together: int = field(default=0, compare=False)

    @property
    def numel(self) -> int:
        """Elements: 1 for shape (), 0 where a dimension is 0."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A parameter's range of its flat. Offsets of one bucket's slots are pairwise distinct, always."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter in one rank's shard.

    `start` counts from the first element of the shard, `offset` from the first element of the parameter's
    own flat. Of an empty fragment all three are 0.
    """

    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + numel` of slot `slot`'s own flat are at `offset` of a flat.

    `slot` -1: they belong to no slot, and are always zero.
    """

    slot: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: its slots, block by block in model order, and the size of its flat (`numel`, padding included).

    `numel` is a positive multiple of `world * ALIGN_BYTES / itemsize`. `group` names its sharding group, of which there
    are `groups`, with `world` ranks each: every `groups`-th rank, or `consecutive` ones. `replicas`: how many groups of
    consecutive ranks gather it among themselves; a divisor of `world`, and 1 unless all ranks share the bucket.
    `copies`: how many groups of consecutive ranks have the same shards.
    """

    id: int
    name: str
    dtype: str
    itemsize: int
    requires_grad: bool
    group: str
    world: int
    slots: tuple[Slot, ...]
    numel: int
    groups: int = 1
    replicas: int = 1
    consecutive: bool = False
    copies: int = 1

    @property
    def trainable(self) -> bool:
        """True if its parameters get gradients: every parameter of a bucket does, or none."""
        return self.requires_grad

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, equal on all ranks."""
        return self.numel // self.world

    @property
    def nbytes(self) -> int:
        """Bytes of the flat: the payload of one gather or reduction."""
        return self.numel * self.itemsize

    def number(self, rank: int) -> int:
        """Which of the `groups` groups `rank` of the engine is in."""
        return rank // self.world % self.groups if self.consecutive else rank % self.groups

    def copy(self, rank: int) -> int:
        """Which of the copies of its shard `rank` of the engine has."""
        return rank // self.world if self.copies > 1 else 0

    def group_rank(self, rank: int) -> int:
        """The number of `rank` of the engine in its group: the rank has the shard of that number."""
        if self.consecutive:
            return rank % self.world
        if self.replicas > 1:
            return rank % self.group_size * self.replicas + rank // self.group_size
        return rank // self.groups

    @property
    def group_size(self) -> int:
        """Ranks that gather the flat together."""
        return self.world // self.replicas

    @cached_property
    def inside(self) -> BucketLayout:
        """How the ranks of one replica gather and reduce the flat: from near shards. Itself without replicas."""
        if self.replicas == 1:
            return self
        groups = self.replicas
        return replace(self, group=INSIDE, world=self.group_size, groups=groups, replicas=1, consecutive=True)

    @property
    def everywhere(self) -> str:
        """The name of the group of all ranks that have its parameters: `group`, or all ranks if shards are copied."""
        return WORLD if self.copies > 1 else self.group

    @property
    def crosses(self) -> bool:
        """True if its gradient is reduced across groups after it was reduced inside."""
        return self.replicas > 1 or self.copies > 1

    @cached_property
    def across(self) -> BucketLayout:
        """How a near shard is gathered from shards and reduced to them, or a copied shard reduced. It has no slots."""
        world, groups, numel = self.replicas * self.copies, self.group_size, self.inside.shard_numel
        alone = replace(self, replicas=1, copies=1, consecutive=False)
        return replace(alone, group=ACROSS, world=world, groups=groups, slots=(), numel=numel)

    def keys(self, name: str) -> tuple[str, ...]:
        """The names that parameter `name` has for all ranks: one for each group's own, by the group's number."""
        return (name,) if self.groups == 1 else tuple(f"{name}{GROUP_MARK}{number}" for number in range(self.groups))

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The shard of rank `rank` of the group: `[start, stop)` of the flat. IndexError outside the group."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside the world of {self.world}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragment(self, slot_index: int, rank: int) -> Fragment:
        """The part of slot `slot_index` inside the shard of rank `rank` of the group."""
        slot = self.slots[slot_index]
        start, stop = self.shard_range(rank)
        first, last = max(slot.offset, start), min(slot.offset + slot.numel, stop)
        if first >= last:
            return Fragment(0, 0, 0)
        return Fragment(first - start, first - slot.offset, last - first)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Elements that each rank gets of a reduction."""
        return (self.shard_numel,) * self.world

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The contents of the flat, from end to end: every slot in one piece, and the gaps between them."""
        slots = (Piece(index, 0, slot.numel, slot.offset) for index, slot in enumerate(self.slots) if slot.numel)
        return with_gaps(slots, self.numel)


def with_gaps(pieces: Iterable[Piece], numel: int) -> tuple[Piece, ...]:
    """`pieces`, in order of offset, and those of no slot that fill a flat [numel] with them."""
    filled, end = [], 0
    for piece in pieces:
        if end < piece.offset:
            filled.append(Piece(-1, 0, piece.offset - end, end))
        filled.append(piece)
        end = piece.offset + piece.numel
    return (*filled, Piece(-1, 0, numel - end, end)) if end < numel else tuple(filled)


def build_layout(
    specs: Iterable[ParameterSpec],
    world: int,
    max_bytes: int,
    by_block: int = True,
    groups: Mapping[str, int] | None = None,
    replicas: int = 1,
    copied: bool = False,
) -> tuple[BucketLayout, ...]:
    """Lay the parameters out in buckets; ids count from 0 in the order of each bucket's first parameter.

    A block's parameters go together. With `by_block` 1, which True is, a bucket never spans two blocks; with more, that
    many neighbouring blocks of one list go together, or as many as fit into `max_bytes`. The other parameters form runs
    of neighbours: a run ends where a parameter of a block comes next. With `by_block` 0, which False is, blocks are
    ignored and the model is one run. Within blocks that go together, or a run, parameters are split by dtype,
    `requires_grad` and sharding group, then in order into flats of at most `max_bytes`; a single parameter above that
    has its own bucket. A slot never spans buckets.

    `groups`: how many groups the `world` ranks form under each name of a sharding group; 1 for names that it lacks.
    `replicas`: of buckets that all ranks share. `copied`: each of them has all shards.

    The result depends on the arguments alone, so every rank computes the same. Names differ. Numbers of groups and
    replicas divide the world, and item sizes divide 128.
    """
    specs, groups = tuple(specs), groups or {}
    order = {spec.name: index for index, spec in enumerate(specs)}
    filled = [
        members
        for unit in _units(specs, by_block, world, max_bytes)
        for alike in _alike(unit, lambda spec: (spec.dtype, spec.requires_grad, spec.group))
        for members in _split_by_size(alike, world // groups.get(alike[0].group, 1), max_bytes)
    ]
    filled.sort(key=lambda members: order[members[0].name])
    names = _bucket_names(filled, by_block)
    return tuple(
        _lay_out(bucket, name, members, world, groups.get(members[0].group, 1), replicas, copied)
        for bucket, (name, members) in enumerate(zip(names, filled, strict=True))
    )


def owners_of_whole(layouts: Iterable[BucketLayout], slots: Iterable[SlotKey], world: int) -> dict[SlotKey, int]:
    """Which of `world` ranks computes with each of these slots as a whole.

    The largest first, each goes to a rank that has the fewest bytes so far; of several to that with most of the slot in
    its shard, then to the first. Over all buckets together: a rank that has nothing of one has more of another. The
    result depends on the arguments alone. The slots are those of buckets that all ranks share.
    """
    known, loads = {layout.id: layout for layout in layouts}, [0] * world
    sizes = {key: known[key[0]].slots[key[1]].numel * known[key[0]].itemsize for key in slots}
    owners = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        bucket, slot = key
        held = [known[bucket].fragment(slot, known[bucket].group_rank(rank)).numel for rank in range(world)]
        owner = owners[key] = min(range(world), key=lambda rank: (loads[rank], -held[rank], rank))
        loads[owner] += sizes[key]
    return owners


def _units(specs: Sequence[ParameterSpec], by_block: int, world: int, max_bytes: int) -> list[list[ParameterSpec]]:
    """Blocks, `by_block` together, and the runs between. A block's parameters need not be neighbours (tied ones)."""

    def in_block(spec: ParameterSpec) -> bool:
        return by_block > 0 and spec.block is not None

    blocks = _alike(filter(in_block, specs), lambda spec: spec.block)
    return [
        *_together(blocks, by_block, world, max_bytes),
        *(list(run) for inside, run in groupby(specs, in_block) if not inside),
    ]


def _together(
    blocks: Iterable[list[ParameterSpec]], most: int, world: int, max_bytes: int
) -> list[list[ParameterSpec]]:
    """Neighbouring blocks of one list, `most` of them together, or as many as fit into `max_bytes`."""
    units: list[list[ParameterSpec]] = []
    count = 0
    for block in blocks:
        fits = bool(units) and _padded_bytes([*units[-1], *block], world) <= max_bytes
        if count < most and fits and _list_of(units[-1]) == _list_of(block):
            units[-1] += block
            count += 1
        else:
            units.append([*block])
            count = 1
    return units


def _list_of(block: Sequence[ParameterSpec]) -> str:
    """The list that a block is a member of. One that has its own name is in none, and the answer is itself."""
    assert block[0].block is not None
    parent, _, own = block[0].block.rpartition(".")
    return parent if own.isdecimal() else block[0].block


def _padded_bytes(specs: Iterable[ParameterSpec], world: int) -> int:
    """What they take in one flat."""
    return round_up(sum(map(_extent_bytes, specs)), world * ALIGN_BYTES)


def _alike(specs: Iterable[ParameterSpec], key: Callable[[ParameterSpec], object]) -> list[list[ParameterSpec]]:
    """Those with equal keys together, in the order of the first of each."""
    groups: dict[object, list[ParameterSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return list(groups.values())


def _split_by_size(alike: Sequence[ParameterSpec], world: int, max_bytes: int) -> list[list[ParameterSpec]]:
    """Fill greedily in order: a bucket is closed when the next parameter would lift its flat over the cap.

    The padding counts, and more ranks need more of it: they may close it earlier. Then parameters have other offsets in
    their flats. Buckets that no cap closes have the same members at the same offsets on any number of ranks.
    """
    parts: list[list[ParameterSpec]] = []
    filled = 0
    for spec in alike:
        extent = _extent_bytes(spec)
        if not parts or round_up(filled + extent, world * ALIGN_BYTES) > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(spec)
        filled += extent
    return parts


def _lay_out(
    bucket: int, name: str, members: Sequence[ParameterSpec], ranks: int, groups: int, replicas: int, copied: bool
) -> BucketLayout:
    first = members[0]
    copied = copied and replicas > 1 and first.group == WORLD
    world = ranks // (replicas if copied else groups)
    slots: list[Slot] = []
    end = 0
    for spec in sorted(members, key=lambda spec: spec.together):
        slots.append(Slot(spec.name, end // spec.itemsize, spec.numel, spec.shape))
        end += _extent_bytes(spec)
    return BucketLayout(
        id=bucket,
        name=name,
        dtype=first.dtype,
        itemsize=first.itemsize,
        requires_grad=first.requires_grad,
        group=INSIDE if copied else first.group,
        world=world,
        slots=tuple(slots),
        numel=round_up(end, world * ALIGN_BYTES) // first.itemsize,
        groups=groups,
        replicas=replicas if first.group == WORLD and not copied else 1,
        consecutive=copied,
        copies=replicas if copied else 1,
    )


def _extent_bytes(spec: ParameterSpec) -> int:
    """Bytes from this slot's start to the next one's.

    Never 0: a parameter is found by its offset, so even one without elements takes its own offset.
    """
    return round_up(max(1, spec.numel * spec.itemsize), ALIGN_BYTES)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _bucket_names(filled: Sequence[Sequence[ParameterSpec]], by_block: int) -> list[str]:
    """One distinct name a bucket, for people: its block, or blocks, or the module of its first parameter.

    Buckets that would share a name get what distinguishes them, in this order: dtype, "frozen", sharding
    group, and a running number where all of these are equal: "layers.0:bfloat16:frozen", "layers.3:1".
    """
    heads = [members[0] for members in filled]
    bases = [_base_name(members, by_block) for members in filled]
    siblings: dict[str, list[ParameterSpec]] = {}
    for base, head in zip(bases, heads, strict=True):
        siblings.setdefault(base, []).append(head)

    names = []
    for base, head in zip(bases, heads, strict=True):
        alike = siblings[base]
        parts = [base]
        if len({other.dtype for other in alike}) > 1:
            parts.append(head.dtype)
        if len({other.requires_grad for other in alike}) > 1 and not head.requires_grad:
            parts.append("frozen")
        if len({other.group for other in alike}) > 1:
            parts.append(head.group)
        names.append(NAME_SEPARATOR.join(parts))

    total, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        if total[name] > 1:
            names[index] = f"{name}{NAME_SEPARATOR}{seen[name]}"
            seen[name] += 1
    return names


def _base_name(members: Sequence[ParameterSpec], by_block: int) -> str:
    """Of a block "layers.4", of several "layers.4-7", else of the module: "norm"."""
    head, last = members[0], members[-1].block
    if by_block and head.block is not None and last is not None:
        return head.block if last == head.block else f"{head.block}-{last.rpartition('.')[2]}"
    module, _, leaf = head.name.rpartition(".")
    return module or leaf
