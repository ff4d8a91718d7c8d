"""Layouts by hand, then the properties of many random ones."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from zeroweave.layout import ALIGN_BYTES, BucketLayout, Fragment, ParameterSpec, Slot, build_layout, owners_of_whole

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
LARGE = 1 << 30


def spec(
    name: str,
    *shape: int,
    block: str | None = None,
    dtype: str = "float32",
    requires_grad: bool = True,
    group: str = "world",
) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, ITEMSIZES[dtype], requires_grad, block, group)


def contents(layout: tuple[BucketLayout, ...]) -> dict[str, list[str]]:
    """Bucket names and what lies in them, in order of ids."""
    assert [bucket.id for bucket in layout] == list(range(len(layout)))
    named = {bucket.name: [slot.name for slot in bucket.slots] for bucket in layout}
    assert len(named) == len(layout), "two buckets have one name"
    return named


def gaps(bucket: BucketLayout) -> list[tuple[int, int]]:
    """What of the flat belongs to no slot, as ranges `[start, stop)`."""
    return [(piece.offset, piece.offset + piece.numel) for piece in bucket.pieces if piece.slot < 0]


def test_slots_are_aligned_and_the_flat_is_padded_to_the_world() -> None:
    (bucket,) = build_layout([spec("m.weight", 5, 7), spec("m.bias", 5)], world=3, max_bytes=LARGE)
    # 35 and 5 elements of 4 bytes: 2 and 1 lines of 32 elements; 3 lines are a line for each of 3 ranks.
    assert bucket.slots == (Slot("m.weight", 0, 35, (5, 7)), Slot("m.bias", 64, 5, (5,)))
    assert (bucket.numel, bucket.shard_numel) == (96, 32)
    assert (bucket.nbytes, bucket.shard_numel * bucket.itemsize) == (384, 128)
    assert gaps(bucket) == [(35, 64), (69, 96)]
    assert [bucket.shard_range(rank) for rank in range(3)] == [(0, 32), (32, 64), (64, 96)]
    assert bucket.name == "m" and bucket.trainable


def test_a_parameter_spans_two_or_three_shards_or_misses_them() -> None:
    three, two, none = spec("three", 80), spec("two", 40), spec("none", 0)
    (bucket,) = build_layout([three, two, none], world=3, max_bytes=LARGE)
    # Offsets 0, 96 and 160; 192 elements in all, 64 a shard.
    assert [slot.offset for slot in bucket.slots] == [0, 96, 160]
    assert [bucket.fragment(0, rank) for rank in range(3)] == [
        Fragment(start=0, offset=0, numel=64),
        Fragment(start=0, offset=64, numel=16),
        Fragment(0, 0, 0),
    ]
    assert [bucket.fragment(1, rank) for rank in range(3)] == [
        Fragment(0, 0, 0),
        Fragment(start=32, offset=0, numel=32),
        Fragment(start=0, offset=32, numel=8),
    ]
    assert [bucket.fragment(2, rank).numel for rank in range(3)] == [0, 0, 0]

    (bucket,) = build_layout([spec("first", 20), spec("long", 150)], world=3, max_bytes=LARGE)
    assert [bucket.fragment(1, rank) for rank in range(3)] == [
        Fragment(start=32, offset=0, numel=32),
        Fragment(start=0, offset=32, numel=64),
        Fragment(start=0, offset=96, numel=54),
    ]


def test_empty_and_tiny_parameters_have_places_of_their_own() -> None:
    specs = [spec("a", 0), spec("b", 3, 0), spec("scalar"), spec("c", 0)]
    (bucket,) = build_layout(specs, world=2, max_bytes=LARGE)
    assert [(slot.offset, slot.numel) for slot in bucket.slots] == [(0, 0), (32, 0), (64, 1), (96, 0)]
    assert bucket.numel == 128
    assert gaps(bucket) == [(0, 64), (65, 128)]

    (only,) = build_layout([spec("empty", 0)], world=4, max_bytes=LARGE)
    assert only.numel == 4 * ALIGN_BYTES // 4 and gaps(only) == [(0, only.numel)]


def test_no_parameters_no_buckets() -> None:
    assert build_layout([], world=2, max_bytes=LARGE) == ()


def test_blocks_and_the_runs_between_them() -> None:
    specs = [
        spec("embed.tokens.weight", 8),
        spec("embed.positions.weight", 8),
        spec("layers.0.up.weight", 8, block="layers.0"),
        spec("layers.0.down.weight", 8, block="layers.0"),
        spec("layers.1.up.weight", 8, block="layers.1"),
        spec("middle", 8),
        spec("layers.2.up.weight", 8, block="layers.2"),
        spec("norm.weight", 8),
        spec("head.weight", 8),
    ]
    assert contents(build_layout(specs, world=2, max_bytes=LARGE)) == {
        "embed.tokens": ["embed.tokens.weight", "embed.positions.weight"],
        "layers.0": ["layers.0.up.weight", "layers.0.down.weight"],
        "layers.1": ["layers.1.up.weight"],
        "middle": ["middle"],
        "layers.2": ["layers.2.up.weight"],
        "norm": ["norm.weight", "head.weight"],
    }
    assert contents(build_layout(specs, world=2, max_bytes=LARGE, by_block=False)) == {
        "embed.tokens": [s.name for s in specs]
    }


def stack(name: str, count: int) -> list[ParameterSpec]:
    """Blocks of 16 elements of float32, two lines of 128 bytes."""
    blocks = [f"{name}.{index}" for index in range(count)]
    return [s for block in blocks for s in (spec(f"{block}.up", 8, block=block), spec(f"{block}.down", 8, block=block))]


@pytest.mark.parametrize(
    ("by_block", "max_bytes", "wanted"),
    [
        (1, LARGE, ["a.0", "a.1", "a.2", "a.3", "a.4", "b.0", "b.1", "norm", "c.0", "d.0"]),
        (2, LARGE, ["a.0-1", "a.2-3", "a.4", "b.0-1", "norm", "c.0", "d.0"]),
        (3, LARGE, ["a.0-2", "a.3-4", "b.0-1", "norm", "c.0", "d.0"]),
        (9, LARGE, ["a.0-4", "b.0-1", "norm", "c.0", "d.0"]),
        (9, 1024, ["a.0-3", "a.4", "b.0-1", "norm", "c.0", "d.0"]),
        (9, 1023, ["a.0-1", "a.2-3", "a.4", "b.0-1", "norm", "c.0", "d.0"]),  # of three the padding takes as much again
        (9, 512, ["a.0-1", "a.2-3", "a.4", "b.0-1", "norm", "c.0", "d.0"]),
        (9, 511, ["a.0:0", "a.0:1", "a.1:0", "a.1:1", "a.2:0", "a.2:1", "a.3:0", "a.3:1", "a.4:0", "a.4:1"]),
    ],
)
def test_neighbouring_blocks_of_a_list_together(by_block: int, max_bytes: int, wanted: list[str]) -> None:
    specs = [*stack("a", 5), *stack("b", 2), spec("norm", 8), *stack("c", 1), *stack("d", 1)]
    layout = build_layout(specs, world=4, max_bytes=max_bytes, by_block=by_block)
    assert [*contents(layout)][: len(wanted)] == wanted
    assert all(bucket.nbytes <= max(max_bytes, 512) for bucket in layout)
    assert [slot.name for bucket in layout for slot in bucket.slots] == [s.name for s in specs]


@pytest.mark.parametrize("regions", [["embed", "head"], ["l.0.attn", "l.0.mlp"], ["l.0.mlp", "l.1.mlp"]])
def test_modules_with_names_of_their_own_stay_apart(regions: list[str]) -> None:
    specs = [
        s
        for region in regions
        for s in (spec(f"{region}.up", 8, block=region), spec(f"{region}.down", 8, block=region))
    ]
    assert [*contents(build_layout(specs, 2, LARGE, by_block=4))] == regions


def test_blocks_together_are_split_by_kind() -> None:
    def block(index: int) -> list[ParameterSpec]:
        name = f"l.{index}"
        return [spec(f"{name}.w", 8, block=name, requires_grad=False), spec(f"{name}.lora", 8, block=name)]

    specs = [*block(0), *block(1), *block(2)]
    assert contents(build_layout(specs, 2, LARGE, by_block=2)) == {
        "l.0-1:frozen": ["l.0.w", "l.1.w"],
        "l.0-1": ["l.0.lora", "l.1.lora"],
        "l.2:frozen": ["l.2.w"],
        "l.2": ["l.2.lora"],
    }


def test_a_block_whose_parameters_are_no_neighbours_is_one_bucket() -> None:
    specs = [spec("a.x", 4, block="a"), spec("b.x", 4, block="b"), spec("a.y", 4, block="a")]
    assert contents(build_layout(specs, 2, LARGE)) == {"a": ["a.x", "a.y"], "b": ["b.x"]}


def test_dtype_requires_grad_and_group_split_a_block() -> None:
    specs = [
        spec("l.0.w", 8, block="l.0", dtype="bfloat16", requires_grad=False),
        spec("l.0.lora", 8, block="l.0"),
        spec("l.0.norm", 8, block="l.0", requires_grad=False),
        spec("l.0.v", 8, block="l.0", dtype="bfloat16", requires_grad=False),
        spec("l.1.w", 8, block="l.1", requires_grad=False),
        spec("l.2.router", 8, block="l.2"),
        spec("l.2.expert", 8, block="l.2", group="experts"),
    ]
    layout = build_layout(specs, 2, LARGE)
    assert contents(layout) == {
        "l.0:bfloat16:frozen": ["l.0.w", "l.0.v"],
        "l.0:float32": ["l.0.lora"],
        "l.0:float32:frozen": ["l.0.norm"],
        "l.1": ["l.1.w"],
        "l.2:world": ["l.2.router"],
        "l.2:experts": ["l.2.expert"],
    }
    assert [bucket.trainable for bucket in layout] == [False, True, False, False, True, True]
    assert [bucket.itemsize for bucket in layout] == [2, 4, 4, 4, 4, 4]
    assert layout[-1].group == "experts"


def test_a_group_of_its_own_is_sharded_over_its_ranks() -> None:
    specs = [spec("l.0.router", 100, block="l.0"), spec("l.0.expert", 100, block="l.0", group="experts")]
    dense, expert = build_layout(specs, 4, LARGE, groups={"experts": 2})
    assert (dense.world, dense.groups, dense.numel) == (4, 1, 128)
    assert (expert.world, expert.groups, expert.numel, expert.shard_numel) == (2, 2, 128, 64)
    assert [(expert.number(rank), expert.group_rank(rank)) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(dense.number(rank), dense.group_rank(rank)) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert dense.keys("l.0.router") == ("l.0.router",)
    assert expert.keys("l.0.expert") == ("l.0.expert@0", "l.0.expert@1")
    (alone,) = build_layout(specs[1:], 4, LARGE, groups={"experts": 4})
    assert (alone.world, alone.shard_numel, alone.numel) == (1, 128, 128)  # lines of 32 elements


def test_a_block_above_the_cap_becomes_several_buckets() -> None:
    # A line of 128 bytes each; the cap of 512 bytes holds four of them, in flats of whole 2 x 128 bytes.
    specs = [spec(f"l.0.p{i}", 32, block="l.0") for i in range(6)]
    specs[2] = spec("l.0.big", 1000, block="l.0")
    assert contents(build_layout(specs, world=2, max_bytes=512)) == {
        "l.0:0": ["l.0.p0", "l.0.p1"],
        "l.0:1": ["l.0.big"],
        "l.0:2": ["l.0.p3", "l.0.p4", "l.0.p5"],
    }


def test_more_ranks_move_parameters_only_where_a_cap_closes_buckets() -> None:
    """Noise and blocks of codes go by places in the flat: see `optim.quantize8`."""
    specs = [spec(name, 64, dtype="bfloat16") for name in "abc"]
    layouts = {(world, cap): build_layout(specs, world, cap) for world in (1, 4) for cap in (256, LARGE)}
    places = {key: [(b.id, slot.name, slot.offset) for b in made for slot in b.slots] for key, made in layouts.items()}
    assert places[1, LARGE] == places[4, LARGE] == [(0, "a", 0), (0, "b", 64), (0, "c", 128)]
    assert places[1, 256] == [(0, "a", 0), (0, "b", 64), (1, "c", 0)]
    assert places[4, 256] == [(0, "a", 0), (1, "b", 0), (2, "c", 0)]


def test_a_run_above_the_cap_takes_each_name_from_its_first_parameter() -> None:
    specs = [spec(f"net.{i}.weight", 64) for i in range(5)] + [spec("net.4.bias", 64)]
    assert contents(build_layout(specs, world=2, max_bytes=512)) == {
        "net.0": ["net.0.weight", "net.1.weight"],
        "net.2": ["net.2.weight", "net.3.weight"],
        "net.4": ["net.4.weight", "net.4.bias"],
    }
    assert contents(build_layout(specs, world=2, max_bytes=1)) == {
        "net.0": ["net.0.weight"],
        "net.1": ["net.1.weight"],
        "net.2": ["net.2.weight"],
        "net.3": ["net.3.weight"],
        "net.4:0": ["net.4.weight"],
        "net.4:1": ["net.4.bias"],
    }


def test_a_place_outside_the_world_has_no_fragment() -> None:
    (bucket,) = build_layout([spec("a", 4)], 2, LARGE)
    for rank in (-1, 2):
        with pytest.raises(IndexError, match="outside the world of 2"):
            bucket.fragment(0, rank)


def test_wholes_go_to_ranks_by_their_bytes_and_to_who_has_most_of_them() -> None:
    layouts = build_layout([spec(n, size, block=n) for n, size in zip("abcd", (64, 32, 64, 30), strict=True)], 2, LARGE)
    owners = owners_of_whole(layouts, [(0, 0), (1, 0), (2, 0), (3, 0)], 2)
    assert owners == {(0, 0): 0, (2, 0): 1, (1, 0): 0, (3, 0): 1}
    (bucket,) = build_layout([spec("a", 128), spec("large", 192), spec("small", 64)], 2, LARGE)
    assert [bucket.fragment(1, rank).numel for rank in range(2)] == [64, 128]
    assert owners_of_whole([bucket], [(0, 1)], 2) == {(0, 1): 1}
    assert owners_of_whole([bucket], [(0, 2), (0, 1)], 2) == {(0, 1): 1, (0, 2): 0}
    assert owners_of_whole([bucket], [], 2) == {}


def test_the_layout_needs_no_torch() -> None:
    module = sys.modules[build_layout.__module__]
    assert not any(getattr(value, "__name__", "").startswith("torch") for value in vars(module).values())


def random_specs(dice: random.Random) -> list[ParameterSpec]:
    """A model with blocks and things between them; now and then a parameter out of place (tied)."""
    specs: list[ParameterSpec] = []
    for part in range(dice.randint(1, 8)):
        block = f"part{part}" if dice.random() < 0.6 else None
        for index in range(dice.randint(0, 6)):
            shape = tuple(dice.choice([0, 1, 1, 2, 3, 7, 33, 64]) for _ in range(dice.randint(0, 3)))
            specs.append(
                spec(
                    f"part{part}.p{index}",
                    *shape,
                    block=block,
                    dtype=dice.choice(["float32", "float32", "bfloat16", "float64"]),
                    requires_grad=dice.random() < 0.8,
                    group=dice.choice(["world", "world", "world", "experts"]),
                )
            )
    if len(specs) > 1 and dice.random() < 0.3:
        specs.insert(0, specs.pop(dice.randrange(len(specs))))
    return specs


@pytest.mark.parametrize("seed", range(120))
def test_properties(seed: int) -> None:
    dice = random.Random(seed)
    specs = random_specs(dice)
    world, max_bytes = dice.randint(1, 9), dice.choice([1, 512, 4096, 1 << 16, LARGE])
    by_block = dice.choice([0, 1, 1, 1, 2, 3])
    groups = {"experts": dice.choice([count for count in range(1, world + 1) if world % count == 0])}
    layout = build_layout(iter(specs), world, max_bytes, by_block, groups)
    assert layout == build_layout(specs, world, max_bytes, by_block, groups)

    contents(layout)
    by_name = {s.name: s for s in specs}
    position = {s.name: index for index, s in enumerate(specs)}
    placed = [slot.name for bucket in layout for slot in bucket.slots]
    assert sorted(placed) == sorted(by_name)
    firsts = [position[bucket.slots[0].name] for bucket in layout]
    assert firsts == sorted(firsts)
    for bucket in layout:
        assert bucket.groups == groups.get(bucket.group, 1) and bucket.world * bucket.groups == world
        check_bucket(bucket, [by_name[slot.name] for slot in bucket.slots], bucket.world, max_bytes)
        members = sorted((bucket.number(rank), bucket.group_rank(rank)) for rank in range(world))
        assert members == list(itertools.product(range(bucket.groups), range(bucket.world)))
        places = [position[slot.name] for slot in bucket.slots]
        if by_block < 2:  # the parameters of one block come before those of the next one
            assert places == sorted(places)
        if by_block:
            check_neighbours(bucket, specs, position, by_block)


def check_bucket(bucket: BucketLayout, members: list[ParameterSpec], world: int, max_bytes: int) -> None:
    line = ALIGN_BYTES // bucket.itemsize
    assert bucket.numel > 0 and bucket.numel % (world * line) == 0
    assert bucket.nbytes <= max_bytes or len(members) == 1
    kinds = {(s.dtype, s.itemsize, s.requires_grad, s.group) for s in members}
    assert kinds == {(bucket.dtype, bucket.itemsize, bucket.requires_grad, bucket.group)}

    offsets = [slot.offset for slot in bucket.slots]
    assert offsets == sorted(set(offsets)) and all(offset % line == 0 for offset in offsets)
    assert all(offset < bucket.numel for offset in offsets)
    owner: list[object] = [None] * bucket.numel
    for slot, member in zip(bucket.slots, members, strict=True):
        assert (slot.shape, slot.numel) == (member.shape, member.numel)
        for place in range(slot.offset, slot.offset + slot.numel):
            assert owner[place] is None
            owner[place] = slot.name
    for start, stop in gaps(bucket):
        assert start < stop
        for place in range(start, stop):
            assert owner[place] is None
            owner[place] = "gap"
    assert None not in owner, "slots and gaps tile the flat"
    ends = [0, *(piece.offset + piece.numel for piece in bucket.pieces)]
    assert [piece.offset for piece in bucket.pieces] == ends[:-1] and ends[-1] == bucket.numel
    check_fragments(bucket)


def check_fragments(bucket: BucketLayout) -> None:
    """Every element of every parameter lies in exactly one fragment, where the flat has it."""
    ranges = [bucket.shard_range(rank) for rank in range(bucket.world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == bucket.numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    for index, slot in enumerate(bucket.slots):
        elements: list[int] = []
        for rank, (start, _) in enumerate(ranges):
            fragment = bucket.fragment(index, rank)
            assert 0 <= fragment.start and fragment.start + fragment.numel <= bucket.shard_numel
            if fragment.numel:
                assert start + fragment.start == slot.offset + fragment.offset
            else:
                assert fragment == Fragment(0, 0, 0)
            elements.extend(range(fragment.offset, fragment.offset + fragment.numel))
        assert elements == list(range(slot.numel))


def check_neighbours(bucket: BucketLayout, specs: list[ParameterSpec], position: dict[str, int], by_block: int) -> None:
    """A bucket lies in so many blocks; outside of blocks no parameter of a block comes between its own."""
    first, last = (position[bucket.slots[end].name] for end in (0, -1))
    blocks = {specs[position[slot.name]].block for slot in bucket.slots}
    assert len(blocks) == 1 or (None not in blocks and len(blocks) <= by_block)
    if blocks == {None}:
        assert all(s.block is None for s in specs[first : last + 1])
