"""Several optimizers as one: their groups, states and schedulers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from zeroweave.errors import ParameterError
from zeroweave.optim.multi_optimizer import Schedulers, Several, WholeMatrices, given, is_optimizer, kind_of, members_of


def made(seed: int = 0) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == whole] for whole in (True, False))
    return model, [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]


def step(model: nn.Module, optimizers: list[Any], number: int) -> None:
    model(torch.full((2, 3), 1.0 + number)).square().mean().backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def weights(model: nn.Module) -> list[Any]:
    return [p.tolist() for p in model.parameters()]


def test_what_was_passed() -> None:
    _, (muon, adamw) = made()
    marked = WholeMatrices(adamw)
    assert given(muon) == [(muon, True)] and given(adamw) == [(adamw, False)] and given(marked) == [(adamw, True)]
    assert given([muon, marked]) == given((muon, marked)) == [(muon, True), (adamw, True)]
    assert given("muon") == [("muon", False)]  # which the check refuses
    with pytest.raises(ParameterError, match="list of optimizers is empty"):
        given([])
    assert all(map(is_optimizer, (muon, marked, [muon, adamw], (marked,))))
    assert not any(map(is_optimizer, ([], [muon, 3], None, muon.param_groups)))


def test_a_step_is_one_of_each_and_groups_are_theirs() -> None:
    (model, both), (other, others) = made(), made()
    one = Several(both)
    assert members_of(one) == tuple(both) and members_of(both[0]) == (both[0],)
    assert kind_of(one) == "Muon + AdamW" and kind_of(both[0]) == "Muon"
    assert [id(group) for group in one.param_groups] == [id(each.param_groups[0]) for each in both]
    losses = []
    for number in range(3):
        one.param_groups[0]["lr"] = others[0].param_groups[0]["lr"] = 0.1 / (1 + number)
        model(torch.full((2, 3), 1.0 + number)).square().mean().backward()
        losses.append(one.step(lambda: 7.5))
        one.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        step(other, others, number)
    assert weights(model) == weights(other) and losses == [7.5] * 3
    assert set(one.state) == set(model.parameters()) and len(one.state) == 4
    held = one.state[model[0].weight]
    assert held is both[0].state[model[0].weight] and "momentum_buffer" in held
    assert nn.Parameter(torch.zeros(1)) not in one.state and len(one.state) == 4
    with pytest.raises(ParameterError, match="add the group to one of them"):
        one.add_param_group({"params": []})


def test_a_state_dict_has_all_and_each_gets_its_part() -> None:
    (model, both), (other, others) = made(), made(seed=1)
    for number in range(2):
        step(model, [Several(both)], number)
        step(other, others, 9 - number)
    both[1].param_groups[0]["lr"] = 0.003
    saved = copy.deepcopy(Several(both).state_dict())
    assert [len(group["params"]) for group in saved["param_groups"]] == [2, 2] and len(saved["state"]) == 4
    other.load_state_dict(model.state_dict())
    Several(others).load_state_dict(saved)
    assert others[1].param_groups[0]["lr"] == 0.003 and [len(each.state) for each in others] == [2, 2]
    for number in range(2, 4):
        step(model, both, number)
        step(other, others, number)
    assert weights(model) == weights(other)


def test_schedulers_move_together() -> None:
    _, both = made()
    one = Schedulers([ExponentialLR(both[0], 0.5), StepLR(both[1], 2, gamma=0.1)])
    assert kind_of(one) == "ExponentialLR + StepLR"
    for each in both:
        each.step()
    one.step()
    saved = one.state_dict()
    one.step()
    assert one.get_last_lr() == pytest.approx([0.025, 0.001])
    one.load_state_dict(saved)
    assert one.get_last_lr() == pytest.approx([0.05, 0.01])
    for each, rate in zip(both, one.get_last_lr(), strict=True):  # which are in the optimizers' state dicts
        each.param_groups[0]["lr"] = rate
    one.step()
    assert one.get_last_lr() == pytest.approx([0.025, 0.001])


def test_a_scheduler_of_all_moves_the_rates_of_each() -> None:
    model, both = made()
    one = Several(both)
    scheduler = ExponentialLR(one, 0.5)
    for number in range(2):
        step(model, [one], number)
        scheduler.step()
    assert [each.param_groups[0]["lr"] for each in both] == pytest.approx([0.025, 0.0025])
