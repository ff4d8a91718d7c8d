"""Updates in one pass beside the optimizer's own steps, on worlds without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def test_nothing_of_the_device_is_kept_of_what_lives_in_host_memory() -> None:
    assert not passes(trained("adamw", "optimizer", torch.bfloat16, True))


def test_a_state_that_should_be_there_from_the_start_is_missed() -> None:
    world = World(build_net(), KINDS["state from the start"], 1, torch.bfloat16, "", rules)
    for state in world.ranks[0].optimizer.state.values():
        state.pop("sum")
    for _ in range(2):
        with pytest.raises(ParameterError, match="lacks sum"):
            world.step(random_gradients(world.ranks[0].model, 0))
