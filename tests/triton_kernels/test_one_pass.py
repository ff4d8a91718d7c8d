"""Updates in one pass beside the optimizer's own steps, on worlds without processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.optim.test_compact import RESETS
from tests.optim.test_state_offload import KINDS, STEPS, states
from tests.optim.world import World, build_net, random_gradients
from tests.triton_kernels.kernels import HERE, rules
from zeroweave.errors import ParameterError

pytestmark = pytest.mark.skipif(HERE.type != "cpu", reason="worlds without processes live on the CPU")
WITHOUT = ({"tiny"}, {"tiny"}, {"layers.1.weight", "scalar"})
"""by step, the parameters without a gradient"""


def trained(kind: str, offload: str, dtype: torch.dtype, in_one_pass: bool) -> World:
    world = World(build_net(), KINDS[kind], 3, dtype, offload, rules if in_one_pass else None)
    for step in range(STEPS):
        without = WITHOUT[step] if step < len(WITHOUT) else set()
        world.step(random_gradients(world.ranks[0].model, step, without))
    return world


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Some steps apart, each of which may differ in the last place."""
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", ["", "optimizer", "params"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_does_what_the_optimizer_does(kind: str, offload: str, dtype: torch.dtype) -> None:
    here, there = (trained(kind, offload, dtype, in_one_pass) for in_one_pass in (True, False))
    mine, theirs = here.parameters(), there.parameters()
    assert [name for name in theirs if not close(mine[name], theirs[name])] == []
    for one, other in zip(here.ranks, there.ranks, strict=True):
        one.sharded.offload.finish()
        other.sharded.offload.finish()
        for my, their in zip(states(one), states(other), strict=True):
            assert list(my) == list(their)
            assert all(close(torch.as_tensor(my[key]), torch.as_tensor(their[key])) for key in their), (my, their)
        assert one.sharded.memory() <= other.sharded.memory() + 4096, "but for what lies between slots"


def passes(world: World) -> list[Any]:
    return [known for rank in world.ranks for known in rank.sharded._one_pass._known.values()]


def test_what_lies_side_by_side_is_one_launch() -> None:
    world = World(build_net(), KINDS["amsgrad"], 1, torch.bfloat16, "", rules)
    for step in range(2):
        world.step(random_gradients(world.ranks[0].model, step))
    assert all(len(ranges) == 1 for _, ranges in passes(world))
    world.step(random_gradients(world.ranks[0].model, 2, {"layers.1.weight"}))
    world.step(random_gradients(world.ranks[0].model, 3))
    steps = [sorted({each.step for each in ranges}) for _, ranges in passes(world)]
    assert sorted(map(len, steps))[-1] == 2, "a parameter that missed a step has its own"


class Between(nn.Module):
    """One of three parameters in a row is in no group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left_out, self.last = (nn.Parameter(torch.randn(100)) for _ in range(3))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_in_no_group_is_not_updated(world: int, compact: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([model.first, model.last], lr=0.1)

    made = World(Between(), make, world, torch.bfloat16, "", rules, compact=compact)
    before = made.parameters()
    for step in range(3):
        made.step(random_gradients(made.ranks[0].model, step))
    changed = {name for name, value in made.parameters().items() if not torch.equal(value, before[name])}
    assert changed == {"first", "last"}
    assert all(len(rank.optimizer.state) <= 2 for rank in made.ranks)


def test_steps_that_others_have_written_count() -> None:
    parameters = []
    for in_one_pass in (True, False):
        world = trained("adamw", "", torch.bfloat16, in_one_pass)
        for rank in world.ranks:
            for bucket, slot in rank.sharded.sharded:
                rank.sharded.set_state(bucket, slot, "step", torch.tensor(1.0))
        world.step(random_gradients(world.ranks[0].model, STEPS))
        parameters.append(world.parameters())
    assert [name for name in parameters[1] if not close(parameters[0][name], parameters[1][name])] == []


def beside(change: Callable[[torch.optim.Optimizer, int], None], make: Any, offload: str = "") -> list[str]:
    """The parameters that come out otherwise by kernels, where `change` is made before each of six steps."""
    parameters = []
    for kernels in (rules, None):
        world = World(build_net(), make, 2, torch.float32, offload, kernels)
        for step in range(6):
            for rank in world.ranks:
                change(rank.optimizer, step)
            world.step(random_gradients(world.ranks[0].model, step))
        parameters.append(world.parameters())
    return [name for name in parameters[1] if not close(parameters[0][name], parameters[1][name])]


@pytest.mark.parametrize("course", [(0.0, 0.0, 0.45, 0.9, 0.9, 0.9), (0.9, 0.9, 0.0, 0.0, 0.9, 0.9)], ids=str)
def test_momentum_may_come_and_go(course: tuple[float, ...]) -> None:
    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = course[step]

    assert beside(change, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=course[0])) == []


@pytest.mark.parametrize("offload", ["", "optimizer"])
@pytest.mark.parametrize("fused", [False, True])
def test_states_that_are_written_in_place_count(fused: bool, offload: str) -> None:
    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        for state in optimizer.state.values() if step == 3 else ():
            for value in state.values():
                value.zero_()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=fused)

    assert beside(change, make, offload) == []


@pytest.mark.parametrize("compact", [False, True])
def test_the_optimizer_can_step_itself_behind_kernels(compact: bool) -> None:
    """A parameter without a gradient until then has no state that would lack something."""
    parameters = []
    for in_one_pass in (True, False):
        kernels = rules if in_one_pass else None
        world = World(build_net(), KINDS["adamw"], 2, torch.bfloat16, "", kernels, compact=compact)
        for step in range(3):
            for rank in world.ranks if step == 2 else ():
                rank.optimizer.param_groups[0]["eps"] = 0.0  # for which there is no kernel
            world.step(random_gradients(world.ranks[0].model, step, {"tiny"} if step < 2 else set()))
        parameters.append(world.parameters())
    rtol = 2**-15 if compact else 2e-6
    assert all(torch.allclose(parameters[0][name], value, rtol, 1e-5) for name, value in parameters[1].items())


def for_a_while(world: World, step: int, why: str) -> None:
    """In two steps of seven, the optimizers step themselves: somebody listens, or there is no kernel for an option."""
    for rank in world.ranks:
        if why == "no kernel":
            for group in rank.optimizer.param_groups:
                group["eps"] = 0.0 if step in (2, 3) else 1e-8
        elif step == 2:
            rank.optimizer.hook = rank.optimizer.register_step_post_hook(lambda *_: None)
        elif step == 4:
            rank.optimizer.hook.remove()


@pytest.mark.parametrize(("offload", "compact"), [("", False), ("optimizer", False), ("", True), ("optimizer", True)])
@pytest.mark.parametrize("why", ["listened to", "no kernel"])
def test_kernels_go_on_where_the_optimizer_has_stepped_itself(why: str, offload: str, compact: bool) -> None:
    """Step counters are the same tensors then, with other numbers."""
    parameters = []
    for kernels in (rules, None):
        world = World(build_net(), KINDS["adamw"], 2, torch.bfloat16, offload, kernels, compact=compact)
        for step in range(7):
            for_a_while(world, step, why)
            world.step(random_gradients(world.ranks[0].model, step))
        parameters.append(world.parameters())
    rtol = 2**-15 if compact else 2e-6
    assert all(torch.allclose(parameters[0][name], value, rtol, 1e-5) for name, value in parameters[1].items())


@pytest.mark.parametrize(("offload", "compact"), [("", False), ("optimizer", False), ("", True), ("optimizer", True)])
@pytest.mark.parametrize("way", RESETS)
def test_an_optimizer_whose_state_is_emptied_begins_anew(way: str, offload: str, compact: bool) -> None:
    make = partial(World, build_net(), KINDS["adamw"], 1, torch.bfloat16, offload, rules, compact=compact)
    world, fresh = make(), make()
    for step in range(2):
        world.step(random_gradients(world.ranks[0].model, step))
    (rank,), (other,) = world.ranks, fresh.ranks
    RESETS[way](rank.optimizer)
    for bucket, view in rank.views.items():
        other.views[bucket].home.put(view.home.values())
    for step in range(2, 4):
        for each in (world, fresh):
            each.step(random_gradients(rank.model, step, {"tiny"} if step == 2 else set()))
    assert [len(one.optimizer.state) for one in (rank, other)] == [8, 8], "what a save would have"
    for mine, theirs in zip(states(rank), states(other), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert all(torch.equal(value, fresh.parameters()[name]) for name, value in world.parameters().items())


def test_nothing_of_the_device_is_kept_of_what_lives_in_host_memory() -> None:
    assert not passes(trained("adamw", "optimizer", torch.bfloat16, True))


def test_a_state_that_should_be_there_from_the_start_is_missed() -> None:
    world = World(build_net(), KINDS["state from the start"], 1, torch.bfloat16, "", rules)
    for state in world.ranks[0].optimizer.state.values():
        state.pop("sum")
    for _ in range(2):
        with pytest.raises(ParameterError, match="lacks sum"):
            world.step(random_gradients(world.ranks[0].model, 0))


def everything(world: World) -> list[torch.Tensor]:
    """Values, moments and step counters."""
    held = [state for rank in world.ranks for state in states(rank)]
    tensors = [torch.as_tensor(value) for state in held for value in state.values()]
    return [t.clone() for t in (*world.parameters().values(), *tensors)]
