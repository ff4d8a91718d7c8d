"""The optimizer's state goes into an engine and comes out again: nothing of a training is lost in between."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.distributed import experts
from tests.support.harness import Pools
from tests.support.marks import slow

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "lion": (zw.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"lr": 3e-3, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 3e-3, "fused": True}),
}
STATES = {"adamw": "exp_avg", "adam": "max_exp_avg_sq", "sgd": "momentum_buffer", "adagrad": "sum"}
DEADLINE = 120.0


class Net(nn.Module):
    """Sizes that spread unevenly; a scalar, a frozen parameter, one that is never used and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tail = nn.Linear(9, 2)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.tail(x).square().mean()


def build(kind: str = "adamw", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model, (optimizer, options) = Net(), KINDS[kind]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": vectors, "lr": 0.01}]
    return model, optimizer(groups, **options)


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "compile": {"enabled": False}, "deadline_seconds": DEADLINE, **more}


def batch(step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(batch(step)))
        engine.step()


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and the optimizer's state, by name."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = value.clone()
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs in any bit, or that only one has."""
    same = [n for n in a.keys() & b.keys() if a[n].dtype == b[n].dtype and torch.equal(a[n], b[n])]
    return sorted((a.keys() | b.keys()) - set(same))


# ---------------------------------------------------------------------- going on after destroy()
def stopped_and_not(kind: str, stages: tuple[int, int], more: dict[str, Any]) -> list[str]:
    """What differs between a training that went on and one that was taken out of the engine, and into another one."""
    found = []
    for parts in ((range(6),), (range(3), range(3, 6))):
        model, optimizer = build(kind)
        for steps, stage in zip(parts, stages, strict=False):
            engine = zw.initialize(model, optimizer, settings(stage, **more))
            train(engine, steps)
            engine.destroy()
        found.append(all_of(model, optimizer))
    key = f"layers.0.weight {STATES.get(kind, 'exp_avg')}"
    assert found[0][key].shape == (9, 9) and found[0][key].any(), "the state must be there to be compared"
    return differing(*found)


EVERY = [(kind, a, b) for kind in KINDS for a in (1, 2, 3) for b in (1, 2, 3)]
TELLING = {("adamw", 3, 2), ("sgd", 1, 3)}


def rows() -> list[Any]:
    return [pytest.param(k, (a, b), marks=[] if (k, a, b) in TELLING else pytest.mark.matrix) for k, a, b in EVERY]


@slow("adamw-stages7")
@pytest.mark.parametrize(("kind", "stages"), rows())
def test_training_goes_on_after_destroy(pools: Pools, kind: str, stages: tuple[int, int]) -> None:
    assert pools(2).run(stopped_and_not, kind, stages, {}) == [[], []]


@pytest.mark.oldest
@pytest.mark.parametrize(("kind", "stages"), rows())
def test_training_goes_on_after_destroy_in_one_process(kind: str, stages: tuple[int, int]) -> None:
    assert stopped_and_not(kind, stages, {}) == []


@pytest.mark.parametrize(
    ("offload", "stages"),
    [
        ("optimizer", (3, 3)),
        ("params", (3, 3)),
        *(pytest.param("optimizer", stages, marks=pytest.mark.matrix) for stages in ((1, 2), (2, 3))),
    ],
)
def test_state_in_host_memory(pools: Pools, offload: str, stages: tuple[int, int]) -> None:
    """Parameters are in host memory at stage 3 only."""
    off = {"optimizer": "all", "params": offload == "params"}
    assert pools(2).run(stopped_and_not, "adamw", stages, {"offload": off}) == [[], []]


def in_and_out_of_host_memory() -> list[str]:
    found = []
    for second in ({}, {"offload": {"optimizer": "all"}}):
        model, optimizer = build()
        for steps, more in ((range(2), second), (range(2, 4), {}), (range(4, 6), second)):
            with zw.initialize(model, optimizer, settings(3, **more)) as engine:
                train(engine, steps)
        found.append(all_of(model, optimizer))
    return differing(*found)


@pytest.mark.matrix
def test_in_and_out_of_host_memory(pools: Pools) -> None:
    assert pools(2).run(in_and_out_of_host_memory) == [[], []]


# ---------------------------------------------------------------------- what destroy() gives back
def given_back(kind: str, stage: int) -> dict[str, Any]:
    """What a plain optimizer, fed with the engine's gradients, and the engine's make of the same."""
    plain, unsharded = build(kind)
    model, optimizer = build(kind)
    groups = [(group, group["params"], list(group["params"])) for group in optimizer.param_groups]
    with zw.initialize(model, optimizer, settings(stage)) as engine:
        for step in range(3):
            engine.backward(engine(batch(step)))
            for name, gradient in engine.gradients().items():
                plain.get_parameter(name).grad = gradient
            engine.step()
            unsharded.step()
    for group, (same, members, users) in zip(optimizer.param_groups, groups, strict=True):
        assert group is same and group["params"] is members and all(map(lambda a, b: a is b, members, users))
    mine, theirs = all_of(model, optimizer), all_of(plain, unsharded)
    assert all(value.is_contiguous() for value in mine.values())
    for number, one in enumerate((plain, model)):  # both go on without an engine
        one.zero_grad()
        one(batch(7)).backward()
        (unsharded, optimizer)[number].step()
    return {"state": differing(mine, theirs), "later": differing(all_of(model, optimizer), all_of(plain, unsharded))}


@pytest.mark.parametrize(
    ("kind", "stage"),
    [pytest.param(k, s, marks=[] if (k, s) in (("adamw", 3), ("adagrad", 2)) else pytest.mark.matrix)
     for k in STATES for s in (1, 2, 3)],
)  # fmt: skip
def test_destroy_gives_whole_state_back(pools: Pools, kind: str, stage: int) -> None:
    """That of a plain optimizer, bit for bit, keys, dtypes and shapes included, on all ranks."""
    assert pools(2).run(given_back, kind, stage) == [{"state": [], "later": []}] * 2


def before_and_after() -> list[list[str]]:
    """State that an engine has nothing to do with, through an engine's life."""
    model, optimizer = build()
    frozen, none, weight = model.frozen, model.none, model.layers[0].weight
    optimizer.state[frozen]["ema"] = torch.arange(7.0)
    optimizer.state[none]["ema"] = torch.zeros(0, 3)
    optimizer.state["global"] = 7
    with zw.initialize(model, optimizer, settings(3)) as engine:
        train(engine, range(1))
        for held in optimizer.state.values():
            if isinstance(held, dict) and "exp_avg" in held:
                held["history"] = [3, torch.ones(2) * engine.rank]
                held["mine"] = torch.full((2, 2), float(engine.rank))
    state = optimizer.state
    assert torch.equal(state[frozen]["ema"], torch.arange(7.0)) and state[none]["ema"].shape == (0, 3)
    assert state["global"] == 7
    assert "exp_avg" not in state.get(model.unused, {}), "without a gradient there is nothing, as in PyTorch"
    rank = dist.get_rank()
    mine = [sorted(state[p]) for p in (weight, model.scale)]
    own = [held for p, held in state.items() if isinstance(p, torch.Tensor) and "mine" in held]
    assert own and all(torch.equal(held["mine"], torch.full((2, 2), float(rank))) for held in own)
    try:
        zw.initialize(model, optimizer, settings(3))
    except zw.ParameterError as error:
        assert "cannot be cut" in str(error) and "'mine' [2, 2] of " in str(error), str(error)
    else:
        raise AssertionError("what cannot be cut was taken")
    return mine


def test_other_state_stays_where_it_is(pools: Pools) -> None:
    for weight, scale in pools(2).run(before_and_after):
        assert {"exp_avg", "exp_avg_sq", "step"} <= set(weight)
        assert {"exp_avg", "exp_avg_sq", "step"} <= set(scale)


# ---------------------------------------------------------------------- an optimizer that was trained before
def trained_before(kind: str, stage: int) -> list[str]:
    """Plain PyTorch for some steps, then the engine, beside plain PyTorch that goes on with the engine's gradients.

    Rank 1 comes with other weights and another state, which do not count.
    """
    seed = dist.get_rank() if dist.is_initialized() else 0
    (plain, unsharded), (model, optimizer) = build(kind), build(kind, seed)
    for one, steps, its in ((plain, range(3), unsharded), (model, range(3 + seed), optimizer)):
        for step in steps:
            one.zero_grad()
            one(torch.randn(4, 9, generator=torch.Generator().manual_seed(step))).backward()
            its.step()
        one.zero_grad()
    with zw.initialize(model, optimizer, settings(stage)) as engine:
        for step in range(3):
            engine.backward(engine(batch(step)))
            for name, gradient in engine.gradients().items():
                plain.get_parameter(name).grad = gradient
            engine.step()
            unsharded.step()
        key = STATES[kind]
        whole = engine.full("layers.1.weight", key)
        assert torch.equal(whole, unsharded.state[plain.layers[1].weight][key])
    return differing(all_of(model, optimizer), all_of(plain, unsharded))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.matrix), pytest.param(2), pytest.param(3)])
@pytest.mark.parametrize("kind", STATES)
def test_an_optimizer_that_was_trained_before(pools: Pools, kind: str, stage: int) -> None:
    assert trained_before(kind, stage) == []
    assert pools(2).run(trained_before, kind, stage) == [[], []]


def only_rank_0_has_state() -> list[str]:
    """As where rank 0 alone has read a checkpoint."""
    model, optimizer = build()
    if dist.get_rank() == 0:
        model(batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zw.initialize(model, optimizer, settings(3)):
        pass
    expected = {}
    if dist.get_rank() == 0:
        expected = all_of(model, optimizer)
    (expected,) = broadcast([expected])
    assert "tail.bias exp_avg" in expected
    return differing(all_of(model, optimizer), expected)


def broadcast(items: list[Any]) -> list[Any]:
    dist.broadcast_object_list(items)
    return items


def test_only_rank_0_has_state(pools: Pools) -> None:
    assert pools(2).run(only_rank_0_has_state) == [[], []]


def different_optimizers(how: str) -> tuple[str, bool]:
    """What is raised, and whether everything is as before."""
    model, optimizer = build()
    other: torch.optim.Optimizer | None = optimizer
    if dist.get_rank() == 1:
        if how == "lr":
            optimizer.param_groups[1]["lr"] = 0.5
        elif how == "groups":
            other = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        elif how == "members":
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        elif how == "class":
            other = torch.optim.Adam(model.parameters())
        else:
            other = None
    before = all_of(model, optimizer)
    try:
        zw.initialize(model, other, settings(3))
    except zw.EngineError as error:
        return str(error), type(model.scale) is nn.Parameter and differing(before, all_of(model, optimizer)) == []
    return "nothing", False


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lr", r"param_groups\[1\]\['lr'\] differ: 0.01 on rank 0, 0.5 on rank 1"),
        ("groups", "2 groups on rank 0 and 1 on rank 1"),
        ("members", r"param_groups\[0\]\['params'\] differ"),
        ("class", "AdamW on rank 0, Adam on rank 1"),
        ("none", "AdamW on rank 0, no optimizer on rank 1"),
    ],
)
def test_ranks_with_different_optimizers(pools: Pools, how: str, words: str) -> None:
    for message, unchanged in pools(2).run(different_optimizers, how):
        assert unchanged
        assert re.search(words, message), message


# ---------------------------------------------------------------------- narrow dtypes
def narrow() -> dict[str, Any]:
    """A bfloat16 model, trained in plain PyTorch, in an engine, and again in plain PyTorch and in an engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 9).bfloat16()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain = optimizer.state[model[0].weight]["exp_avg"].clone()
    with zw.initialize(model, optimizer, settings(3)) as engine:
        taken = engine.full("0.weight", "exp_avg")
        train_on(engine, x)
        inside = engine.full("0.weight", "exp_avg")
    after = optimizer.state[model[0].weight]["exp_avg"]
    with zw.initialize(model, optimizer, settings(2)) as engine:
        again = engine.full("0.weight", "exp_avg")
    optimizer.load_state_dict(optimizer.state_dict())
    model(x).square().mean().backward()
    optimizer.step()
    return {
        "taken": taken.dtype == torch.float32 and torch.equal(taken, plain.float()),
        "given back": after.dtype == torch.float32 and torch.equal(after, inside),
        "taken again": torch.equal(again, after),
        "narrow again": optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16,
        "weights": model[0].weight.dtype == torch.bfloat16,
    }


def train_on(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).float().square().mean())
    engine.step()


def test_narrow_parameters_keep_wide_state(pools: Pools) -> None:
    for found in pools(2).run(narrow):
        assert all(found.values()), found


# ---------------------------------------------------------------------- experts
def expert_state(stage: int) -> list[str]:
    """Ranks have experts of their own: with engines and without a stop, and each rank's state with its weights."""
    found = []
    for parts in ((range(4),), (range(2), range(2, 4))):
        module = experts.build(2, seed=0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for steps in parts:
            groups = {"parameters": [experts.PATTERN], "parallel_size": 2}
            with zw.initialize(module, optimizer, settings(stage, experts=groups)) as engine:
                for step in steps:
                    engine.backward(engine(experts.sentences(step, engine.rank, engine.world)))
                    engine.step()
        found.append(all_of(module, optimizer))
    assert any("experts" in name and name.endswith("exp_avg") for name in found[0])
    return differing(*found)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts(pools: Pools, stage: int) -> None:
    assert pools(4).run(expert_state, stage) == [[]] * 4
