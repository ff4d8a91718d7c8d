"""Optimizers that cannot run on fragments are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroweave.errors import ParameterError
from zeroweave.optim.check import check_optimizer


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_ordinary_optimizers_pass(model: nn.Module) -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        check_optimizer(kind(model.parameters(), lr=0.1), model)
    named = torch.optim.AdamW(model.named_parameters())
    check_optimizer(named, model)
    check_optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "SparseAdam"])
def test_optimizers_of_torch_that_are_not_element_wise(model: nn.Module, kind: str) -> None:
    with pytest.raises(ParameterError, match=f"optimizer {kind}.*\n.*not element-wise"):
        check_optimizer(getattr(torch.optim, kind)([p for p in model.parameters() if p.ndim == 2]), model)


def test_known_names_of_other_packages(model: nn.Module) -> None:
    class Lamb(torch.optim.SGD):
        pass

    with pytest.raises(ParameterError, match="norms of whole parameters"):
        check_optimizer(Lamb(model.parameters(), lr=0.1), model)


def test_a_step_that_needs_a_closure(model: nn.Module) -> None:
    class Needs(torch.optim.SGD):
        def step(self, closure: Any) -> None: ...

    with pytest.raises(ParameterError, match=r"step\(\) needs closure"):
        check_optimizer(Needs(model.parameters(), lr=0.1), model)


def test_everything_is_named_in_one_error(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([model[0].weight, model[1].weight], lr=0.1)
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[model[0].weight]["factors"] = torch.zeros(4, 1)
    optimizer.param_groups[0]["params"] += [model[1].weight, nn.Parameter(torch.zeros(3, 5))]
    with pytest.raises(ParameterError) as caught:
        check_optimizer(optimizer, model)
    text = str(caught.value)
    assert "optimizer over other parameters" in text and "param_groups[0]['params'][3] (3, 5)" in text
    assert "twice in its groups: 1.weight" in text
    assert "state that cannot be cut like its parameters ('factors' [4, 1] of 0.weight [4, 4])" in text


def test_state_that_can_be_cut_passes(model: nn.Module) -> None:
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    model[1].bias.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[model[1].bias].update(note="kept", trust=torch.ones(1), seen=[1, 2])
    check_optimizer(optimizer, model)


def test_not_an_optimizer(model: nn.Module) -> None:
    with pytest.raises(ParameterError, match=r"not a torch\.optim\.Optimizer"):
        check_optimizer(object(), model)  # type: ignore[arg-type]
