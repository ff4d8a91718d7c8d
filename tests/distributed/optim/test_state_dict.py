"""`optimizer.state_dict()` and `load_state_dict()` inside an engine: those of whole parameters, on rank 0."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.distributed import experts
from tests.distributed.optim.test_optimizer_state import KINDS, all_of, batch, build, differing, settings, train
from tests.support.harness import Pools
from tests.support.marks import daily

OFFLOAD = {"offload": {"optimizer": "all"}}
Saved = dict[str, Any]


def saved(engine: zw.Engine) -> tuple[Saved, Saved]:
    """Weights and optimizer, as scripts save them."""
    assert engine.optimizer is not None
    return engine.state_dict(), engine.optimizer.state_dict()


def loaded(kind: str, stage: int, state: tuple[Saved, Saved], **more: Any) -> zw.Engine:
    """An engine of another seed that has loaded rank 0's `state`."""
    engine = zw.initialize(*build(kind, seed=1), settings(stage, **more))
    assert engine.optimizer is not None
    engine.load_state_dict(state[0] if engine.rank == 0 else {})
    engine.optimizer.load_state_dict(state[1] if engine.rank == 0 else {})
    return engine


def by_index(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A plain optimizer's state, as its `state_dict` names it."""
    state = optimizer.state_dict()["state"]
    return {f"{index} {key}": value.clone() for index, held in state.items() for key, value in held.items()}


# ---------------------------------------------------------------------- there and back
def stopped_and_not(kind: str, stages: tuple[int, int], more: dict[str, Any]) -> list[Any]:
    """What a training that went on has, and what one has that was loaded by another engine, are the same."""
    model, optimizer = build(kind)
    with zw.initialize(model, optimizer, settings(stages[0], **more)) as engine:
        train(engine, range(3))
        state = saved(engine)
        if engine.rank:
            assert state[1]["state"] == {}
        assert [len(group["params"]) for group in state[1]["param_groups"]] == [5, 7]
        train(engine, range(3, 5))
        rank = engine.rank
    with loaded(kind, stages[1], state, **more) as engine:
        train(engine, range(3, 5))
        other, others = engine.module, engine.optimizer
        assert others is not None
    assert rank or any(value.any() for held in state[1]["state"].values() for value in held.values())
    return differing(all_of(model, optimizer), all_of(other, others))


ROWS = [(kind, (a, b), more) for kind in KINDS for a, b in ((3, 1), (2, 3), (1, 2)) for more in ({}, OFFLOAD)]
TELLING = [("adamw", (3, 1), OFFLOAD), ("adagrad", (2, 3), {})]


@daily(("kind", "stages", "more"), TELLING, [row for row in ROWS if row not in TELLING])
def test_a_training_goes_on_with_what_was_saved(
    pools: Pools, kind: str, stages: tuple[int, int], more: dict[str, Any]
) -> None:
    assert pools(2).run(stopped_and_not, kind, stages, more) == [[], []]


def plain_and_back(kind: str) -> list[Any]:
    """A plain training goes on in an engine, and goes on in plain PyTorch with what that saved."""
    plain, unsharded = build(kind)
    for step in range(2):
        plain(batch(step)).backward()
        unsharded.step()
        plain.zero_grad()
    before = by_index(unsharded)
    with loaded(kind, 3, (plain.state_dict(), unsharded.state_dict())) as engine:
        assert engine.optimizer is not None
        train(engine, range(2, 4))
        state = saved(engine)
    again, optimizer = build(kind, seed=2)
    again.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    train_plain = {name: p.detach().clone() for name, p in again.named_parameters()}
    again(batch(9)).backward()
    optimizer.step()
    moved = [name for name, p in again.named_parameters() if not torch.equal(p, train_plain[name])]
    for name in before.keys() & by_index(optimizer).keys():
        assert before[name].shape == by_index(optimizer)[name].shape, name
    steps = {int(v) for name, v in by_index(optimizer).items() if name.endswith(" step")}
    return [before.keys() - by_index(optimizer).keys(), len(moved) > 5, steps <= {5}]


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_plain_checkpoints_are_loaded_and_made(kind: str) -> None:
    missing, moved, counted = plain_and_back(kind)
    assert not missing and moved and counted


def test_groups_and_steps_of_other_versions(pools: Pools) -> None:
    """The options of groups are those of the state dict, on all ranks, and a step that is a number becomes a tensor."""
    assert pools(2).run(old) == [(0.25, True, 4.0)] * 2


def old() -> tuple[Any, bool, float]:
    model, optimizer = build()
    with zw.initialize(model, optimizer, settings(2)) as engine:
        train(engine, range(3))
        state = optimizer.state_dict()
        for held in state["state"].values():
            held["step"] = 3
        state["param_groups"][1]["lr"] = 0.25 if engine.rank == 0 else 7.0
        groups = [group["params"] for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        assert all(group["params"] is before for group, before in zip(optimizer.param_groups, groups, strict=True))
        train(engine, range(3, 4))
        step = engine.full("layers.0.weight", "step")
        assert step is not None
    return optimizer.param_groups[1]["lr"], isinstance(step, torch.Tensor), float(step)


# ---------------------------------------------------------------------- what is refused
def refused() -> list[str]:
    """Each leaves the engine as it is."""
    model, optimizer = build()
    words = []

    def attempt(call: Any, *arguments: Any) -> None:
        with pytest.raises(zw.EngineError) as caught:
            call(*arguments)
        words.append(str(caught.value))

    with zw.initialize(model, optimizer, settings(3)) as engine:
        train(engine, range(2))
        state = optimizer.state_dict()
        engine.backward(engine(batch(2)))
        attempt(optimizer.state_dict)
        attempt(optimizer.load_state_dict, state)
        engine.step()
        if engine.rank == 0:
            number = next(iter(state["state"]))
            state["state"][number]["exp_avg"] = torch.zeros(3)
        attempt(optimizer.load_state_dict, state)
        attempt(optimizer.load_state_dict, torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())
        attempt(optimizer.load_state_dict, {})
        train(engine, range(3, 5))
        assert engine.global_steps == 5
    return words


def test_what_is_refused_changes_nothing(pools: Pools) -> None:
    for words in pools(2).run(refused):
        window, other_window, shape, groups, empty = words
        assert window.startswith("[ZW402] optimizer.state_dict() while gradients wait")
        assert other_window.startswith("[ZW402] optimizer.load_state_dict() while gradients wait")
        assert "'exp_avg' [3] of layers.0.weight [9, 9]" in shape
        assert "its groups have [2] parameters, those of the optimizer [5, 7]" in groups
        assert "it is not an optimizer's state dict (KeyError" in empty


def test_a_failing_hook_of_somebody_else_leaves_the_optimizer_as_it_is() -> None:
    model, optimizer = build()

    def fail(*_: Any) -> None:
        raise ValueError("no such luck")

    with zw.initialize(model, optimizer, settings(3)) as engine:
        train(engine, range(2))
        handle = optimizer.register_state_dict_pre_hook(fail)
        with pytest.raises(ValueError, match="no such luck"):
            optimizer.state_dict()
        handle.remove()
        train(engine, range(2, 3))
        assert {int(held["step"]) for held in optimizer.state_dict()["state"].values()} == {3}
        handle = optimizer.register_load_state_dict_pre_hook(fail)
        with pytest.raises(ValueError, match="no such luck"):
            optimizer.load_state_dict(optimizer.state_dict())
        handle.remove()
        train(engine, range(3, 4))
        assert {int(held["step"]) for held in optimizer.state_dict()["state"].values()} == {4}


def test_groups_that_have_changed_are_refused() -> None:
    model, optimizer = build()
    with zw.initialize(model, optimizer, settings(3)) as engine:
        train(engine, range(2))
        state = optimizer.state_dict()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
            with pytest.raises(zw.ParameterError, match="groups changed"):
                call()
        del optimizer.param_groups[2]
        train(engine, range(2, 3))


def test_an_engine_that_was_dropped_has_taken_the_state_along() -> None:
    model, optimizer = build()
    engine = zw.initialize(model, optimizer, settings(3))
    train(engine, range(1))
    del engine, model
    gc.collect()
    with pytest.raises(zw.ParameterError, match="dropped without destroy"):
        optimizer.state_dict()


def with_experts() -> str:
    model = experts.build(2)
    config = settings(3, experts={"parallel_size": 2, "parameters": [experts.PATTERN]})
    with zw.initialize(model, torch.optim.AdamW(model.parameters()), config) as engine:
        assert engine.optimizer is not None
        with pytest.raises(zw.EngineError) as caught:
            engine.optimizer.state_dict()
    return str(caught.value)


def test_experts_of_their_own_are_refused(pools: Pools) -> None:
    for words in pools(2).run(with_experts):
        assert "each of 2 groups of ranks has experts of its own: use engine.save()" in words
