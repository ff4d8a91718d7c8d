"""States of few bits: the same in every world, what a single process computes, and half the bytes at rest."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim.test_step import one_group, two_groups
from tests.optim.world import Net, Rank, World, build_net, random_gradients
from tests.support.marks import daily
from zeroweave.comm.rounding import join_, noise_, split_
from zeroweave.errors import ParameterError
from zeroweave.optim.compact import CODES, CompactMoments, refuse_compact
from zeroweave.optim.quantize8 import BLOCK, Coded, decode, encode_
from zeroweave.optim.state_offload import StateOffload
from zeroweave.optim.states import tensors_in
from zeroweave.runtime.transfers import Transfers

BF16 = torch.bfloat16


def listened(model: nn.Module) -> torch.optim.Optimizer:
    """Stepped as a whole."""
    optimizer = one_group(torch.optim.AdamW, lr=0.01)(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


KINDS: dict[str, Any] = {
    "adamw": two_groups(torch.optim.AdamW),
    "adam": one_group(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "listened to": listened,
    "maximize": one_group(torch.optim.AdamW, lr=0.01, maximize=True, foreach=False),
}
DAILY = [("adamw", 1), ("adamw", 3), ("adam", 2), ("listened to", 2)]
WITHOUT = ({"tiny"}, {"tiny"}, {"layers.1.weight", "scalar"}, set[str]())


def trained(kind: str, world: int, steps: int = 4) -> World:
    made = World(build_net(), KINDS[kind], world, BF16, compact=True)
    for step in range(steps):
        made.step(random_gradients(made.ranks[0].model, step, WITHOUT[step % 4]))
    return made


def states(world: World) -> dict[tuple[str, str], Tensor]:
    """Moments, whole, by parameter and key."""
    found: dict[tuple[str, str], Tensor] = {}
    for key in CODES:
        for layout in world.layouts:
            for index, slot in enumerate(layout.slots) if layout.trainable else ():
                held = [rank.sharded.state_of(layout.id, index).get(key) for rank in world.ranks]
                if parts := [part for part in held if part is not None]:
                    found[slot.name, key] = torch.cat(parts).view(slot.shape)
    return found


def single(kind: str, steps: int = 4) -> tuple[Net, dict[tuple[str, str], Tensor]]:
    """One process with whole parameters: torch's step in float32, and what is coded of it."""
    net = copy.deepcopy(build_net())
    offsets = {slot.name: slot.offset for each in World(net, KINDS[kind], 1, BF16).layouts for slot in each.slots}
    optimizer = KINDS[kind](net)
    named = {name: p for name, p in net.named_parameters() if p.requires_grad and p.numel()}
    for parameter in named.values():
        parameter.data.copy_(rounded(parameter.data, None))
    for step in range(steps):
        gradients = random_gradients(net, step, WITHOUT[step % 4])
        for name, parameter in net.named_parameters():
            parameter.grad = gradients.get(name)
        optimizer.step()
        for name, parameter in named.items():
            if state := optimizer.state.get(parameter):
                random = torch.empty(-(-parameter.numel() // BLOCK) * BLOCK, dtype=torch.int32)
                noise_(random, offsets[name], int(state["step"]))
                parameter.data.copy_(rounded(parameter.data, random[: parameter.numel()]))
                for key, code in CODES.items():
                    state[key].copy_(recoded(state[key], code, random))
    return net, {(name, key): optimizer.state[p][key] for name, p in named.items() for key in CODES}


def rounded(values: Tensor, random: Tensor | None) -> Tensor:
    flat = values.reshape(-1).contiguous()
    shard, rest = torch.empty_like(flat, dtype=BF16), torch.empty_like(flat, dtype=torch.int8)
    split_(flat, shard, rest, random)
    return join_(torch.empty_like(flat), shard, rest).view(values.shape)


def recoded(values: Tensor, code: torch.dtype, random: Tensor) -> Tensor:
    padded = torch.zeros(random.numel())
    padded[: values.numel()] = values.reshape(-1)
    held = Coded.zeros(random.numel(), code, values.device)
    encode_(held, padded, random)
    return decode(held)[: values.numel()].view(values.shape)


@daily(
    ("kind", "world"),
    DAILY,
    [(kind, world) for kind in KINDS for world in (1, 2, 3) if (kind, world) not in DAILY],
)
def test_every_world_computes_what_a_single_process_does(kind: str, world: int) -> None:
    found = trained(kind, world)
    net, moments = single(kind)
    ours = found.parameters()
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and parameter.numel():
            assert torch.equal(ours[name], parameter.detach()), name
    for place, value in states(found).items():
        assert torch.equal(value, moments[place]), place


def test_what_has_no_gradient_stays_as_it_is() -> None:
    world = trained("adamw", 2)
    before, moments = world.parameters(), states(world)
    world.step(random_gradients(world.ranks[0].model, 9, {"layers.0.weight", "tiny"}))
    after, now = world.parameters(), states(world)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in ("layers.0.weight", "tiny", "none", "frozen"))
    for name, key in now:
        assert torch.equal(now[name, key], moments[name, key]) == (name in ("layers.0.weight", "tiny"))


def alive(rank: Rank) -> int:
    """Bytes of all tensors that a rank's states and masters are kept in, by storages: nothing is counted twice."""
    held: dict[int, int] = {}
    homes = [t for view in rank.views.values() if view.layout.trainable for t in (*view.home.at_rest, view.home.master)]
    codes = [t for each in rank.sharded.offload.compact.values() for t in each.tensors]
    moments = [*codes, *tensors_in(list(rank.optimizer.state.values()))]
    fragments = [p for each in rank.sharded._fragments.values() for p in each.parameters]
    for tensor in (*homes, *moments, *fragments):
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(held.values())


def in_memory() -> dict[int, int]:
    """Bytes of all storages of more than a kilobyte that anybody refers to."""
    gc.collect()
    found = [tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return {key: size for key, size in sizes.items() if size > 1000}


def test_half_the_bytes_at_rest() -> None:
    before = in_memory()
    world = trained("adam", 1)
    (rank,) = world.ranks
    numel = sum(layout.numel for layout in world.layouts if layout.trainable)
    counters = 4 * sum("step" in state for state in rank.optimizer.state.values())
    assert alive(rank) == numel * (2 + 1 + 1 + 1) + 2 * numel // BLOCK * 4 + counters
    assert rank.sharded.memory() == 2 * numel + 2 * numel // BLOCK * 4 + counters
    assert all(set(state) == {"step"} for state in rank.optimizer.state.values())
    model = sum(p.nbytes for p in rank.model.parameters())
    more = sum(size for key, size in in_memory().items() if key not in before) - model
    assert more <= 5.2 * numel, "somebody keeps what was lifted"


@pytest.mark.parametrize("broken", [0, -1])
def test_a_landing_that_fails_leaves_nothing_behind(broken: int) -> None:
    """One bucket cannot be decoded: before any other has landed, or when all others have."""
    world, other = trained("adam", 1), trained("adam", 1)
    (rank,) = world.ranks
    compact = rank.sharded.offload.compact
    moments = compact[sorted(compact, reverse=True)[broken]]
    memory, whole = alive(rank), moments.coded["exp_avg_sq"]
    gradients = random_gradients(rank.model, 4)
    moments.coded["exp_avg_sq"] = whole._replace(scales=whole.scales[:0])
    with pytest.raises(RuntimeError, match="size of tensor"):
        world.step(gradients, at_once=True)
    moments.coded["exp_avg_sq"] = whole
    assert all(set(state) == {"step"} for state in rank.optimizer.state.values())
    assert alive(rank) == memory
    for one in (world, other):  # what was coded meanwhile is what is updated
        for each in one.ranks[0].sharded.offload.compact.values():
            each.coded["exp_avg"].scales.mul_(2)
        one.step(gradients, at_once=True)
    assert all(torch.equal(value, other.parameters()[name]) for name, value in world.parameters().items())
    assert all(torch.equal(value, states(other)[place]) for place, value in states(world).items())


def no_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("no memory")


def test_without_memory_for_noise_nothing_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made before the update: afterwards that would be lost."""
    world = trained("adam", 1)
    (rank,) = world.ranks
    parameters, moments, memory = world.parameters(), states(world), alive(rank)
    counters = {fragment: float(state["step"]) for fragment, state in rank.optimizer.state.items()}
    monkeypatch.setattr(CompactMoments, "room_for_noise", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        world.step(random_gradients(rank.model, 4), at_once=True)
    monkeypatch.undo()
    assert alive(rank) == memory and all(set(state) == {"step"} for state in rank.optimizer.state.values())
    assert {fragment: float(state["step"]) for fragment, state in rank.optimizer.state.items()} == counters
    assert all(torch.equal(value, parameters[name]) for name, value in world.parameters().items())
    assert all(torch.equal(value, moments[place]) for place, value in states(world).items())


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("broken", ["noise_", "encode_"])
def test_a_lowering_that_fails_leaves_no_copies(broken: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = trained("adam", 1, steps)
    (rank,) = world.ranks
    masters = [view.home.master for view in rank.views.values() if view.layout.trainable]
    monkeypatch.setattr(f"zeroweave.optim.compact.{broken}", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        world.step(random_gradients(rank.model, 4), at_once=True)
    monkeypatch.undo()
    assert {frozenset(state) for state in rank.optimizer.state.values()} == {frozenset({"step"} if steps else ())}
    assert not any(master.untyped_storage().nbytes() for master in masters)
    assert all(rank.sharded.state_of(*place).keys() in ({"step", *CODES}, set()) for place in rank.sharded.sharded)
    before = world.parameters()
    world.step(random_gradients(rank.model, 5))
    assert len(states(world)) == 2 * len(rank.sharded.sharded)
    assert not any(torch.equal(before[slot], now) for slot, now in world.parameters().items() if now.numel() > 100)


def test_moments_land_where_the_master_is_at_hand() -> None:
    """No engine has such a bucket: its masters are split."""
    full, compact = (World(build_net(), KINDS["adam"], 1, BF16) for _ in range(2))
    (rank,) = compact.ranks
    views = {bucket: view for bucket, view in rank.views.items() if view.layout.trainable}
    assert all(view.home.at_hand for view in views.values())
    transfers, fragments = Transfers(torch.device("cpu")), rank.sharded._fragments
    rank.sharded.offload = StateOffload(transfers, views, fragments, rank.optimizer, (), views)
    for step in range(4):
        for one in (full, compact):
            one.step(random_gradients(one.ranks[0].model, step))
        assert all(set(state) == {"step"} for state in rank.optimizer.state.values())
    found, wanted = states(compact), states(full)
    assert found.keys() == wanted.keys()
    for place, value in wanted.items():
        assert float((found[place] - value).norm()) <= 0.05 * float(value.norm()), place


def test_states_can_be_written() -> None:
    world = trained("adamw", 1)
    layout = next(layout for layout in world.layouts if layout.name == "layers.0")
    sharded, bucket, name = world.ranks[0].sharded, layout.id, layout.slots[0].name
    moments = states(world)
    value = torch.linspace(-1, 1, 33 * 33)
    sharded.set_state(bucket, 0, "exp_avg", value)
    sharded.set_state(bucket, 0, "step", torch.tensor(7.0))
    held = sharded.state_of(bucket, 0)
    assert torch.allclose(held["exp_avg"], value, atol=1e-2) and float(held["step"]) == 7.0
    assert torch.equal(held["exp_avg_sq"].view(33, 33), moments[name, "exp_avg_sq"])
    now = states(world)
    assert [place for place in moments if not torch.equal(now[place], moments[place])] == [(name, "exp_avg")]
    sharded.replace(bucket, {0: {}})
    assert sharded.state_of(bucket, 0) == {} and set(sharded.state_of(bucket, 1)) == {"step", *CODES}
    sharded.replace(bucket, {0: dict(held)})
    assert list(sharded.state_of(bucket, 0)) == list(held)
    assert all(torch.equal(sharded.state_of(bucket, 0)[key], held[key]) for key in held)
    world.step(random_gradients(world.ranks[0].model, 0))


RESETS: dict[str, Any] = {
    "emptied": lambda optimizer: optimizer.state.clear(),
    "replaced": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("way", RESETS)
def test_an_optimizer_whose_state_is_emptied_begins_anew(way: str) -> None:
    world, fresh = trained("adam", 2), World(build_net(), KINDS["adam"], 2, BF16, compact=True)
    for rank, other in zip(world.ranks, fresh.ranks, strict=True):
        RESETS[way](rank.optimizer)
        for bucket, view in rank.views.items():
            other.views[bucket].home.put(view.home.values())
    for where, slot in world.ranks[0].sharded.sharded:
        assert world.ranks[0].sharded.state_of(where, slot) == {}
        assert world.ranks[0].sharded.offload.outline_of(where, slot) == {}
    for each in (world, fresh):
        each.step(random_gradients(each.ranks[0].model, 9, {"tiny"}))
    found, wanted = states(world), states(fresh)
    assert found.keys() == wanted.keys() and ("tiny", "exp_avg") not in found
    assert all(torch.equal(value, wanted[place]) for place, value in found.items())
    assert all(torch.equal(value, fresh.parameters()[name]) for name, value in world.parameters().items())


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has taken a step before there is an engine."""
    optimizer = KINDS["adam"](model)
    for name, gradient in random_gradients(model, 0).items():
        model.get_parameter(name).grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_states_that_were_there_before_are_taken_over() -> None:
    net = build_net()
    world = World(net, stepped, 2, BF16, compact=True)
    optimizer = stepped(net)
    for (name, key), value in states(world).items():
        wanted = optimizer.state[net.get_parameter(name)][key]
        root = (lambda t: t.sqrt()) if key == "exp_avg_sq" else (lambda t: t)
        assert torch.allclose(root(value), root(wanted), rtol=0.1, atol=float(root(wanted).abs().max()) * 2e-3), name


def test_what_cannot_be_compact_is_refused() -> None:
    net = build_net()
    layouts = World(net, KINDS["adam"], 1, BF16).layouts
    refuse_compact(KINDS["adam"](net), layouts)
    for make, words in [
        (one_group(torch.optim.SGD, lr=0.1), "AdamW, and not for SGD"),
        (one_group(torch.optim.NAdam), "AdamW, and not for NAdam"),
        (one_group(type("Own", (torch.optim.AdamW,), {})), "AdamW, and not for Own"),
        (one_group(torch.optim.Adam, amsgrad=True), "its group 0 has amsgrad: .* has to be False"),
    ]:
        with pytest.raises(ParameterError, match=words):
            refuse_compact(make(net), layouts)
    with pytest.raises(ParameterError, match="AdamW, and there is no optimizer"):
        refuse_compact(None, layouts)
    with pytest.raises(ParameterError, match="for parameters that are trained, and there are none"):
        refuse_compact(KINDS["adam"](net), [layout for layout in layouts if not layout.trainable])
    world = trained("adam", 1)
    before = world.parameters()
    world.ranks[0].optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ParameterError, match="nothing was updated: the optimizer's group 0 has amsgrad"):
        world.step(random_gradients(world.ranks[0].model, 0))
    assert all(torch.equal(value, before[name]) for name, value in world.parameters().items())
    with pytest.raises(ParameterError, match=r"not tiny, .*layers.0.weight.* set precision.params to 'bfloat16'"):
        refuse_compact(KINDS["adam"](net), World(net, KINDS["adam"], 1, torch.float32).layouts)
