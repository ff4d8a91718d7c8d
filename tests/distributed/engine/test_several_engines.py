"""Engines beside and after each other: each compiles its own regions, in a process group of its own."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zeroweave as zw
from tests.distributed.engine.test_weights_between_steps import config, momentum, step_of
from tests.support.harness import Pools
from tests.support.models import entry
from tests.support.reference import build, worst
from tests.support.zoo import rows


def twelve_engines() -> list[tuple[int, dict[str, str], float]]:
    """More engines of one class than Dynamo's recompile limit, alive together: calls, eager regions, losses."""
    engines = []
    for _ in range(12):
        model = build(entry("mlp"))
        engines.append(zw.initialize(model, momentum(model.parameters()), config(3, "aot_eager")))
    found = []
    for engine in engines:
        losses = [step_of(engine, index) for index in range(2)]
        found.append((engine.stats.compiled_calls, dict(engine.stats.eager_regions), losses[-1]))
    for engine in engines:
        engine.destroy()
    return found


@pytest.mark.matrix
def test_twelve_engines_of_one_class_are_all_compiled(pools: Pools) -> None:
    for found in pools(2).run(twelve_engines):
        assert all(calls > 0 and not eager for calls, eager, _ in found), found
        assert len({loss for _, _, loss in found}) == 1


def engines_in_turn() -> list[tuple[float, str]]:
    """Engines of three stages, their steps interleaved: differences from the first one."""
    engines = []
    for stage in (1, 2, 3):
        model = build(entry("mlp"))
        engines.append(zw.initialize(model, momentum(model.parameters()), config(stage, "eager")))
    for index in range(3):
        x, y = rows(dist.get_rank(), index)
        losses = [F.mse_loss(engine(x), y) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    finals: list[dict[str, Tensor]] = []
    for engine in engines:
        with engine.full_parameters() as full:
            finals.append({name: parameter.detach().clone() for name, parameter in full.items()})
        engine.destroy()
    return [worst(final, finals[0]) for final in finals]


@pytest.mark.matrix
def test_engines_in_turn(pools: Pools) -> None:
    for differences in pools(2).run(engines_in_turn):
        assert [difference for difference, _ in differences] == [0.0, 0.0, 0.0]


def group_of_two() -> tuple[int, float] | None:
    """An engine over a part of the world."""
    group = dist.new_group([0, 2])
    if dist.get_rank() not in (0, 2):
        return None
    model = build(entry("mlp"))
    with zw.initialize(model, momentum(model.parameters()), config(3, "eager"), process_group=group) as engine:
        return engine.world, [step_of(engine, index) for index in range(2)][-1]


def test_a_process_group_of_its_own(pools: Pools) -> None:
    first, absent, last = pools(3).run(group_of_two)
    assert absent is None and first[0] == last[0] == 2
