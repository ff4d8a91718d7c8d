"""States of few bits in host memory: the same bits as on the device, and nothing else travels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.optim.kernels import Kernels
from tests.optim.test_compact import KINDS, RESETS, WITHOUT, no_memory, states, stepped
from tests.optim.test_state_offload import Noting, step
from tests.optim.world import Rank, World, build_net, random_gradients
from zeroweave.optim.compact import CODES, CompactMoments
from zeroweave.optim.quantize8 import BLOCK

BF16 = torch.bfloat16


def make(kind: str, world: int, offload: str, fast: bool) -> World:
    return World(build_net(), KINDS[kind], world, BF16, offload, Kernels() if fast else None, compact=True)


def train(world: World, steps: range) -> World:
    for index in steps:
        world.step(random_gradients(world.ranks[0].model, index, WITHOUT[index % 4]))
    return world


def pair(kind: str = "adamw", world: int = 1, fast: bool = False) -> tuple[World, World]:
    """On the device, and in host memory, after four steps."""
    here, there = (train(make(kind, world, offload, fast), range(4)) for offload in ("", "optimizer"))
    return here, there


def everything(world: World) -> dict[str, Tensor]:
    """Masters, what is gathered, codes, scales and step counters, by rank."""
    found: dict[str, Tensor] = {}
    for index, rank in enumerate(world.ranks):
        rank.sharded.offload.finish()
        for bucket, view in rank.views.items():
            found |= {f"{index} {bucket} master": view.home.values(), f"{index} {bucket} source": view.home.source}
        for bucket, moments in rank.sharded.offload.compact.items():
            for key, coded in moments.coded.items():
                found |= {f"{index} {bucket} {key} {part}": each for part, each in zip("cs", coded, strict=True)}
        held = [state for parameter, state in rank.optimizer.state.items() if parameter.numel()]
        for number, state in enumerate(held):
            assert set(state) <= {"step"}
            found |= {f"{index} {number} step": each for each in state.values()}
    return {name: value.clone() for name, value in found.items()}


def differing(one: World, other: World) -> list[str]:
    mine, theirs = everything(one), everything(other)
    assert mine.keys() == theirs.keys()
    return [name for name, value in mine.items() if not torch.equal(value, theirs[name])]


def assert_at_home(world: World) -> None:
    """All that leaves the device lies in host tensors, and nothing is lifted."""
    for rank in world.ranks:
        offload = rank.sharded.offload
        assert not offload._lifted and offload._transfers.slack.states == 0
        for bucket, moments in offload.compact.items():
            home = rank.views[bucket].home
            assert home.is_split and home.at_rest[1] is home.hosts[0].tensor and home.source is not home.at_rest[1]
            assert not home.master.untyped_storage().nbytes()
            hosts = [host.tensor for host in offload._moments[bucket].hosts]
            assert len(hosts) == len(moments.tensors) and all(map(lambda a, b: a is b, hosts, moments.tensors))
        assert offload.host_nbytes() == sum(moments.nbytes for moments in offload.compact.values())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("kind", "world"), [("adamw", 1), ("adamw", 3), ("adam", 2), ("listened to", 2)])
def test_bit_equal_to_compact_states_on_the_device(kind: str, world: int, fast: bool) -> None:
    fast = fast and kind == "adamw"  # the double has no coupled decay
    here, there = pair(kind, world, fast)
    assert differing(here, there) == []
    assert len(states(there)) > 10 and [r.sharded.memory() for r in here.ranks] == [
        r.sharded.memory() for r in there.ranks
    ]
    assert_at_home(there)
    for rank in there.ranks if fast else ():
        assert rank.sharded._one_pass is not None and not rank.sharded._one_pass._known, "memory of the device is kept"


def noted(fast: bool) -> tuple[Rank, Noting]:
    kernels = Kernels() if fast else None
    rank = Rank(build_net(), KINDS["adamw"], 0, 1, BF16, "optimizer", kernels, compact=True)
    return rank, note(rank)


def note(rank: Rank) -> Noting:
    transfers, offload = Noting(), rank.sharded.offload
    offload._transfers = transfers
    for moments in offload._moments.values():
        moments._transfers = transfers
    for view in rank.views.values():
        view.home._transfers = transfers
    return transfers


@pytest.mark.parametrize("fast", [False, True])
def test_what_travels_is_codes_scales_and_remainders(fast: bool) -> None:
    rank, transfers = noted(fast)
    order = [bucket for bucket in sorted(rank.views, reverse=True) if rank.views[bucket].layout.trainable]
    numels = [rank.views[bucket].shard.numel() for bucket in order]
    step(rank, 0)  # codes are made on the device, and go home
    downs = [size for direction, size in transfers.log if direction == "down"]
    assert downs == [numel * 3 + 2 * numel // BLOCK * 4 for numel in numels]
    assert sum(size for direction, size in transfers.log if direction == "up") == sum(numels)
    transfers.log.clear()
    step(rank, 1)
    sizes = [rank.sharded.offload._nbytes(bucket) for bucket in order]
    assert sizes == downs and len(sizes) >= 3
    assert [direction for direction, _ in transfers.log] == ["up", *["up", "down"] * (len(sizes) - 1), "down"]
    for wanted in ("up", "down"):
        assert [size for direction, size in transfers.log if direction == wanted] == sizes


Act = Callable[[World, pytest.MonkeyPatch], None]


def written(world: World, _: pytest.MonkeyPatch) -> None:
    sharded, bucket = world.ranks[0].sharded, next(b.id for b in world.layouts if b.name == "layers.0")
    sharded.set_state(bucket, 0, "exp_avg", torch.linspace(-1, 1, 33 * 33))
    sharded.set_state(bucket, 0, "step", torch.tensor(7.0))
    held = dict(sharded.state_of(bucket, 1))
    sharded.replace(bucket, {1: {}})
    assert sharded.state_of(bucket, 1) == {}
    train(world, range(4, 5))
    sharded.replace(bucket, {1: {**held, "exp_avg": held["exp_avg"] * 2}})
    view = world.ranks[0].views[bucket]
    view.home.put(view.home.values() * 1.5)


def emptied(way: str) -> Act:
    def act(world: World, _: pytest.MonkeyPatch) -> None:
        RESETS[way](world.ranks[0].optimizer)
        train(world, range(4, 9))

    return act


def shown(world: World, _: pytest.MonkeyPatch) -> None:
    """Shown states are float32 on the device."""
    with world.ranks[0].sharded.shown():
        for state in world.ranks[0].optimizer.state.values():
            assert state["exp_avg"].dtype == torch.float32
            state["exp_avg"].mul_(2)


def kernel_fails(at: int) -> Act:
    def act(world: World, _: pytest.MonkeyPatch) -> None:
        (rank,) = world.ranks
        kernels = rank.sharded._one_pass._kernels
        kernels.broken = kernels.launches + at
        with pytest.raises(RuntimeError, match="broken kernel"):
            step(rank, 4)
        kernels.broken = -1

    return act


def optimizer_fails(world: World, _: pytest.MonkeyPatch) -> None:
    (rank,) = world.ranks
    good = rank.optimizer.param_groups[1].pop("betas")
    with pytest.raises(KeyError):
        step(rank, 4)
    rank.optimizer.param_groups[1]["betas"] = good


def no_memory_for(*what: object, empty: bool = False) -> Act:
    """Whatever is written on the device before it goes home: the halves of a master stay together.

    `empty`: slots that the program has emptied stay so.
    """

    def act(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        if empty:
            world.ranks[0].optimizer.state.clear()
        with monkeypatch.context() as patch:
            patch.setattr(*what, no_memory)  # type: ignore[call-overload]
            with pytest.raises(torch.OutOfMemoryError):
                world.step(random_gradients(world.ranks[0].model, 4))

    return act


JOIN = "zeroweave.runtime.shard.join_"
ACTS: dict[str, tuple[Act, bool]] = {
    **{f"written, {fast=}": (written, fast) for fast in (False, True)},
    **{f"{way}, {fast=}": (emptied(way), fast) for way in RESETS for fast in (False, True)},
    "shown": (shown, False),
    **{f"kernel {at} fails": (kernel_fails(at), True) for at in range(3)},
    "the optimizer fails": (optimizer_fails, False),
    "landing fails": (no_memory_for(CompactMoments, "room_for_noise"), False),
    "joining fails": (no_memory_for(JOIN), False),
    "joining fails behind a reset": (no_memory_for(JOIN, empty=True), False),
    "noise fails": (no_memory_for("zeroweave.optim.compact.noise_"), False),
    "splitting fails": (no_memory_for("zeroweave.runtime.shard.split_"), False),
    "encoding fails": (no_memory_for("zeroweave.optim.compact.encode_"), False),
}
"""What is done between steps, and whether there are kernels."""


@pytest.mark.parametrize("name", ACTS)
def test_it_has_the_same_effect_and_states_are_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, fast = ACTS[name]
    here, there = pair(fast=fast)
    for world in (here, there):
        act(world, monkeypatch)
        world.ranks[0].sharded.offload.recall()  # as the next window's first forward does
    assert differing(here, there) == []
    assert_at_home(there)
    assert differing(*(train(world, range(5, 8)) for world in (here, there))) == []


def test_states_can_be_shown_after_a_landing_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair()
    with monkeypatch.context() as patch:
        patch.setattr("zeroweave.runtime.shard.join_", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            there.step(random_gradients(there.ranks[0].model, 4))
    offload = there.ranks[0].sharded.offload
    assert max(offload.compact) not in offload._lifted and len(offload._lifted) == 1, "the next one waits for its turn"
    with there.ranks[0].sharded.shown():
        pass
    assert_at_home(there)
    assert differing(*(train(world, range(5, 7)) for world in (here, there))) == []


def test_states_that_were_there_before_are_taken_over() -> None:
    here, there = (World(build_net(), stepped, 2, BF16, offload, compact=True) for offload in ("", "optimizer"))
    assert_at_home(there)
    assert {key for _, key in states(there)} == set(CODES) and differing(here, there) == []
    assert differing(*(train(world, range(2)) for world in (here, there))) == []


def test_a_learning_rate_on_the_device_is_not_read_by_the_host() -> None:
    """The optimizer steps itself then."""
    (rank,) = World(build_net(), KINDS["adamw"], 1, BF16, "", Kernels(), compact=True).ranks
    one_pass, bucket = rank.sharded._one_pass, next(iter(rank.sharded._views))
    assert one_pass is not None and one_pass.takes(bucket)
    rank.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    assert one_pass.takes(bucket), "the host has it"
    rank.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="meta")
    assert not one_pass.takes(bucket)
