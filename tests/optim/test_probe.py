"""Optimizers of unknown classes are tried out: element-wise ones pass, the others are refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.optim import samples
from tests.optim.world import World, assert_equal, build_net, random_gradients, unsharded_step
from zeroweave import Lion
from zeroweave.errors import ParameterError
from zeroweave.optim.check import ELEMENT_WISE, check_optimizer
from zeroweave.optim.probe import probe, try_out

Make = Callable[[nn.Module], torch.optim.Optimizer]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(150, 70), nn.LayerNorm(70), nn.Linear(70, 9, bias=False))


def one_group(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def two_groups(kind: type[torch.optim.Optimizer], first: dict[str, Any], second: dict[str, Any]) -> Make:
    """Matrices and the rest."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return kind([{"params": matrices, **first}, {"params": others, **second}])

    return make


def looking_ahead(model: nn.Module) -> torch.optim.Optimizer:
    return samples.LookAhead(samples.OwnAdamW(model.parameters()))


def from_zero(model: nn.Module) -> torch.optim.Optimizer:
    """A warm-up begins with a rate of 0."""
    optimizer = samples.OwnAdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


ELEMENT_WISE_ONES: dict[str, Make] = {
    **{
        kind.__name__: one_group(kind)
        for kind in (
            samples.OwnAdamW,
            samples.OwnMomentum,
            samples.OwnAdagrad,
            samples.OwnRMSprop,
            samples.OwnLion,
            samples.OwnAdan,
            samples.ScheduleFree,
            samples.SubAdam,
            samples.InFloat32,
        )
    },
    "nesterov": one_group(samples.OwnMomentum, nesterov=True, weight_decay=0.1),
    "two groups": two_groups(samples.OwnAdamW, {"weight_decay": 0.1}, {"lr": 0.5}),
    "foreach": one_group(samples.SubAdam, foreach=True, amsgrad=True),
    "fused": one_group(samples.SubAdam, fused=True),
    "capturable": one_group(samples.SubAdam, capturable=True, lr=torch.tensor(0.01)),
    "looking ahead": looking_ahead,
    "warm-up": from_zero,
    "a trust ratio that is off": one_group(samples.TrustAdam, beta=0.0),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", ELEMENT_WISE_ONES)
def test_element_wise_optimizers_pass(name: str) -> None:
    model = build()
    assert probe(ELEMENT_WISE_ONES[name](model)) == []


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"lr": 0.0}])
@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE, key=str))
def test_known_optimizers_would_pass(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    if "fused" in options and kind.__name__ not in ("Adam", "AdamW", "SGD", "Adagrad"):
        options = {"weight_decay": 0.1} if kind is not torch.optim.Rprop else {}
    if "foreach" in options and kind is Lion:
        options = {"maximize": True}
    assert probe(kind(build().parameters(), **options)) == []


@pytest.mark.parametrize("name", ["OwnAdamW", "OwnAdan", "ScheduleFree", "OwnAdagrad", "looking ahead"])
def test_who_passes_trains_the_same(name: str) -> None:
    make, model = ELEMENT_WISE_ONES[name], build_net()
    sharded, optimizer = World(model, make, 3), make(model)
    for step in range(12):
        gradients = random_gradients(model, step)
        sharded.step(gradients)
        unsharded_step(model, optimizer, gradients)
    assert_equal(sharded.parameters(), model)


PART = "a step on a part of a parameter differs from that part of a step on the whole"
REFUSED: dict[str, tuple[Make, str]] = {
    **{
        kind.__name__: (one_group(kind), PART)
        for kind in (
            samples.NormSGD,
            samples.Orthogonal,
            samples.TrustSGD,
            samples.TrustAdam,
            samples.Factored,
            samples.Clipping,
            samples.Centralized,
            samples.Cautious,
            samples.FreeOfRates,
            samples.Seldom,
            samples.Blocks,
            samples.KeepsParameters,
        )
    },
    "rate 0": (one_group(samples.NormSGD, lr=0.0), PART),
    "one group of two": (two_groups(samples.TrustAdam, {"beta": 0.0}, {"lr": 0.0}), "in place of a parameter of par"),
    "only matrices": (lambda model: samples.Orthogonal([p for p in model.parameters() if p.ndim == 2]), PART),
    "Noisy": (one_group(samples.Noisy), "draws random numbers"),
    "MatricesOnly": (
        lambda model: samples.MatricesOnly([p for p in model.parameters() if p.ndim == 2]),
        "does not run on parts of parameters.*a vector",
    ),
    "Locked": (one_group(samples.Locked), "cannot be found out.*attribute 'lock' cannot be copied"),
    "Waiting": (one_group(samples.Waiting), "cannot be found out.*param_groups.0. change nothing"),
    "NeedsClosure": (one_group(samples.NeedsClosure), "cannot be found out.*a step of a copy of it fails"),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    make, why = REFUSED[name]
    model = build()
    optimizer = make(model)
    with pytest.raises(
        ParameterError, match=f"optimizer {type(optimizer).__name__} cannot be used(.|\n)*{why}"
    ) as caught:
        check_optimizer(optimizer, model)
    assert "use AdamW, Adam or SGD" in str(caught.value)


def test_attributes_of_parameters_count() -> None:
    model = build()
    assert probe(samples.Flagged(model.parameters())) == []
    model[3].weight.by_sign = True
    (why,) = probe(samples.Flagged(model.parameters()))
    assert PART in why


def test_sizes_are_no_larger_than_the_models() -> None:
    """What treats large matrices alone in another way is element-wise for a model without any."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    assert probe(samples.Factored(model.parameters())) == []


def test_optimizers_with_state_are_tried_out_with_state() -> None:
    model, make = build(), one_group(samples.OwnAdan)
    optimizer = make(model)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, step)
        optimizer.step()
    assert probe(optimizer) == []


@pytest.mark.parametrize("kind", [samples.NormSGD, samples.OwnAdagrad, samples.SubAdam, samples.Noisy, samples.Locked])
def test_nothing_is_changed(kind: type[torch.optim.Optimizer]) -> None:
    model = build()
    optimizer = kind(model.parameters(), lr=0.0)
    if kind is samples.SubAdam:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    heard: list[str] = []
    owns = (
        vars(samples.Plain) if isinstance(optimizer, samples.Plain) else {}
    )  # torch calls it for `super().step()`, too
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    everybodys = register_optimizer_step_pre_hook(lambda one, *_: heard.append("global") if "step" in owns else None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    attributes = dict(vars(optimizer))
    groups = [(id(group), dict(group), list(group["params"])) for group in optimizer.param_groups]
    state = {
        p: (id(held), {k: (id(v), copy.deepcopy(v)) for k, v in held.items()}) for p, held in optimizer.state.items()
    }
    values = [p.detach().clone() for p in model.parameters()]
    torch_random, python_random = torch.get_rng_state(), random.getstate()
    try:
        probe(optimizer)
    finally:
        everybodys.remove()
    assert heard == []
    assert vars(optimizer) == attributes and scheduler.optimizer is optimizer
    assert [(id(group), dict(group), list(group["params"])) for group in optimizer.param_groups] == groups
    assert optimizer.state.keys() == state.keys()
    for p, held in optimizer.state.items():
        assert id(held) == state[p][0] and held.keys() == state[p][1].keys()
        for key, value in held.items():
            assert id(value) == state[p][1][key][0] and torch.equal(value, state[p][1][key][1])
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), values, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_random) and random.getstate() == python_random


def test_only_some_of_many_groups_are_tried_out() -> None:
    """A group for each parameter: those that differ in numbers alone are alike."""
    calls = []

    class Counting(samples.OwnAdamW):
        def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
            calls.append(p.shape)
            return super().update(group, p, g, s)

    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))
    groups = [{"params": [p], "lr": 1e-3 * (i + 1), "weight_decay": 0.1} for i, p in enumerate(layers.parameters())]
    check_optimizer(Counting(groups), layers)
    assert len(calls) <= 4 * 4 * 12


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedLion8bit", "AdamW4bit", "AdamWFp8"])
def test_state_in_blocks_is_refused_by_name(name: str) -> None:
    model = build()
    kind = type(name, (torch.optim.AdamW,), {})
    with pytest.raises(ParameterError, match=f"optimizer {name} (.|\n)*blocks of few bits"):
        check_optimizer(kind(model.parameters()), model)


# ---------------------------------------------------------------------- options and states of a checkpoint
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE, key=lambda kind: kind.__name__))
def test_whatever_an_optimizer_has_written_it_goes_on_with(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    for more in ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"momentum": 0.9}, {"centered": True}):
        part = nn.Parameter(torch.ones(4, dtype=dtype))
        part.grad = torch.ones_like(part)
        try:
            optimizer: Any = kind([part], **more)  # type: ignore[call-arg]
            optimizer.step()
        except (TypeError, RuntimeError):
            assert more or dtype.is_complex  # it has no such option, or not for this dtype
            continue
        group, plain = optimizer.param_groups[0], kind([part])
        options = {key: value for key, value in group.items() if key != "params"}
        for own in (optimizer, plain):
            assert not try_out(own, own.param_groups[0], options, optimizer.state[part], dtype)
        for key in optimizer.state[part]:
            wrong = {**optimizer.state[part], key: torch.zeros(3)}
            if optimizer.state[part][key].shape == (4,) and "fused" not in more:
                assert try_out(optimizer, group, options, wrong, dtype)
        assert list(optimizer.state) == [part]
