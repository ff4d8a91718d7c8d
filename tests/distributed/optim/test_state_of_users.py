"""What user code may ask of `optimizer.state`, and states that a checkpoint can hold or has to refuse."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.harness import Pools

SETTINGS = {"stage": 2, "compile": {"enabled": False}}


def engine_of(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    made = make(model.parameters())
    optimizer = zw.element_wise(made) if isinstance(made, torch.optim.Optimizer) else made
    return zw.initialize(model, optimizer, SETTINGS)


def learn(engine: Any, steps: int = 1) -> None:
    for step in range(steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()


USES: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda state, p: state[p]["exp_avg"],
    "asked": lambda state, p: "exp_avg" in state[p],
    "get": lambda state, p: state.get(p),
    "written": lambda state, p: state.__setitem__(p, {}),
    "default": lambda state, p: state.setdefault(p, {}),
    "taken out": lambda state, p: state.pop(p, None),
}


@pytest.mark.parametrize("many", [False, True], ids=["one optimizer", "several"])
def test_the_state_of_a_sharded_parameter_is_refused_by_name(many: bool) -> None:
    def make(parameters: Any) -> Any:
        first, *rest = parameters
        return (
            [torch.optim.AdamW([first]), torch.optim.SGD(rest, momentum=0.9)]
            if many
            else torch.optim.AdamW([first, *rest])
        )

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    given = make(model.parameters())
    engine: Any = zw.initialize(model, given, SETTINGS)
    optimizer, weight = given[0] if many else given, model[0].weight

    def refused() -> None:
        for use in USES.values():
            with pytest.raises(zw.ParameterError, match=r"'0.weight'.*engine.full\(.*engine.set_full\(.*set_local"):
                use(optimizer.state, weight)

    assert weight not in optimizer.state
    refused()
    learn(engine)
    assert weight in optimizer.state and all(weight is not key for key in optimizer.state)
    refused()
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    refused()
    learn(engine)
    engine.set_full("0.weight", torch.zeros(6, 4), "exp_avg")
    assert not engine.full("0.weight", "exp_avg").any()
    engine.destroy()
    assert type(optimizer.state) is defaultdict and optimizer.state[weight]["exp_avg"].shape == (6, 4)


def test_other_keys_work_as_before() -> None:
    engine = engine_of(torch.optim.AdamW)
    state, frozen = engine.optimizer.state, engine.module[0].bias
    learn(engine)
    assert len(copy.deepcopy(state)) == len(state) == sum(1 for _ in state.items()) == 3
    state[frozen]["ema"], state["shared"]["steps"] = 1, 2
    assert state.get(frozen) == {"ema": 1} and state.pop("shared") == {"steps": 2} and state.get("none", 3) == 3


def test_an_optimizer_inside_another_that_shares_its_state_still_does() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.inner = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
            self.inner.param_groups = self.param_groups
            for group in self.param_groups:
                group.update({key: value for key, value in self.inner.defaults.items() if key not in group})
            self.inner.state = self.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    engine = engine_of(Around)
    learn(engine, 2)
    assert engine.full("0.weight", "momentum_buffer").any()


# ---------------------------------------------------------------------- checkpoints
KEYS = ("ema/fast", "ema%2Ffast", "a.b@0", "", "/", "~x")


class Keyed(torch.optim.SGD):
    """Keeps an average, and a count, under each of some odd keys."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            for number, key in enumerate(KEYS):
                self.state[p].setdefault(key, p.clone()).lerp_(p, 0.1 * (number + 1))
                self.state[p][f"{key}/n"] = self.state[p].get(f"{key}/n", torch.zeros(())) + number


def odd_keys(folder: Path) -> list[str]:
    first = engine_of(lambda parameters: Keyed(parameters, lr=0.1))
    learn(first, 3)
    first.save(folder)
    second = engine_of(lambda parameters: Keyed(parameters, lr=0.1))
    second.load(folder)
    for engine in (first, second):
        learn(engine)
    wanted = [key for each in KEYS for key in (each, f"{each}/n")]
    return [key for key in wanted if not torch.equal(first.full("2.weight", key), second.full("2.weight", key))]


def test_states_under_odd_keys_come_back(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(odd_keys, tmp_path) == [[], []]


class Buffers(torch.optim.Optimizer):
    """Two momenta of each parameter, in a dictionary or a list."""

    def __init__(self, parameters: Any, kind: type) -> None:
        super().__init__(parameters, {"kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                made = [torch.zeros_like(p), torch.zeros_like(p)]
                held = self.state[p].setdefault("buffers", dict(enumerate(made)) if group["kind"] is dict else made)
                for number in range(2):
                    p.sub_(held[number].mul_(0.4 * number).add_(p.grad), alpha=0.1)


def in_containers(folder: Path, kind: type) -> list[bool]:
    engine = engine_of(lambda parameters: Buffers(parameters, kind))
    learn(engine, 2)
    calls: list[Callable[[], Any]] = [lambda: engine.save(folder), engine.optimizer.state_dict]
    told = []
    for call in calls:
        with pytest.raises(zw.EngineError, match=rf"elements of '.*' in a {kind.__name__} under 'buffers'"):
            call()
        told.append(True)
    words = "dropped the optimizer's state: the optimizer keeps"
    with nullcontext() if engine.rank else pytest.warns(UserWarning, match=words):
        engine.destroy()
    return [*told, not any(folder.iterdir()), not engine.optimizer.state]


@pytest.mark.parametrize("kind", [dict, list])
def test_elements_in_a_dictionary_or_list_are_refused_on_all_ranks(pools: Pools, tmp_path: Path, kind: type) -> None:
    assert all(map(all, pools(2).run(in_containers, tmp_path, kind)))
