"""What a schedule is asked to change is held to what the config allows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from zeroweave.config import Config
from zeroweave.engine.settings import changes_of, facts_of, policy_of
from zeroweave.errors import EngineError
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.schedule import Reduce, Settle

NUMBER = "a valid integer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefetch": -1}, "prefetch must be 'auto' or greater than or equal to 0, not -1"),
        ({"prefetch": True}, f"prefetch must be 'auto' or {NUMBER}, not True"),
        ({"prefetch": "none"}, f"prefetch must be 'auto' or {NUMBER}, not 'none'"),
        ({"memory_budget": True}, f"memory_budget must be 'auto' or 'none' or {NUMBER}, not True"),
        ({"memory_budget": 1.5}, f"memory_budget must be 'auto' or 'none' or {NUMBER}, not 1.5"),
        ({"memory_budget": "lots"}, f"memory_budget must be 'auto' or 'none' or {NUMBER}, not 'lots'"),
        ({"memory_budget": -1}, "memory_budget must be 'auto' or 'none' or greater than or equal to 0, not -1"),
        ({"depth": 0}, "depth must be greater than or equal to 1, not 0"),
        ({"depth": True}, f"depth must be {NUMBER}, not True"),
        ({"keep": "some"}, "keep must be 'auto', 'none' or 'all' or a valid tuple, not 'some'"),
        ({"keep": 5}, "keep must be 'auto', 'none' or 'all' or a valid tuple, not 5"),
    ],
    ids=repr,
)
def test_what_the_config_refuses_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=rf"^\[ZW401\] {re.escape(message)}$"):
        changes_of(**changes)


def test_what_it_allows_is_taken_and_none_is_no_change() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("prefetch", "keep", "memory_budget", "depth"))
    assert changes_of(**nothing) == {}
    some: dict[str, Any] = {"prefetch": 0, "memory_budget": 0, "depth": 1}
    assert changes_of(**some) == some
    for keep in (["blocks.0"], ("blocks.0",), iter(["blocks.0"]), {"blocks.0"}):
        assert changes_of(keep=keep) == {"keep": ("blocks.0",)}
    words: dict[str, Any] = {"prefetch": "auto", "keep": "none", "memory_budget": "none"}
    assert changes_of(**words) == words


@pytest.mark.parametrize(
    ("least", "fixed", "registered", "copied"),
    [(None, False, [], []), (1024, False, [1], [1]), (None, True, [0, 1], []), (1024, True, [0, 1], [0, 1])],
)
def test_which_buckets_have_registered_buffers_and_which_of_them_copy_engines_gather(
    least: int | None, fixed: bool, registered: list[int], copied: list[int]
) -> None:
    specs = [ParameterSpec(f"{n}.w", (size,), "float32", 4, True, str(n)) for n, size in enumerate((8, 1024))]
    layouts, config = build_layout(specs, 2, 1 << 20), Config(stage=3)
    policy = policy_of(config, layouts, {spec.name for spec in specs})
    facts = facts_of(config, layouts, policy, None, least, fixed)
    assert (sorted(facts.registered), sorted(facts.copied)) == (registered, copied)


def in_flight(engine: Any) -> int:
    """The most of one step."""
    flying = most = 0
    for instruction in engine.executed:
        flying += isinstance(instruction, Reduce) - isinstance(instruction, Settle)
        most = max(most, flying)
    return most


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_reductions_on_demand_follow_the_settings_too(stage: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
    config = {"stage": stage, "compile": {"enabled": False}, "reduce": {"depth": 4}}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        engine.reschedule(depth=3)
        step(engine)  # without a schedule
        assert in_flight(engine) == 3
        step(engine)
        assert in_flight(engine) == 3
        engine.reschedule(depth=1)
        step(engine)
        assert in_flight(engine) == 1
