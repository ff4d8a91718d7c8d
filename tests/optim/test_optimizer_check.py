"""Optimizers that cannot run on fragments are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroweave.errors import ParameterError, UnsupportedOptimizer
from zeroweave.optim.lion import Lion
from zeroweave.optim.multi_optimizer import WholeMatrices, element_wise, given
from zeroweave.optim.optimizer_check import check_optimizer, check_optimizers


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


def test_whole_matrices_are_for_those_that_no_fragments_would_do(model: nn.Module) -> None:
    class Orthogonal(torch.optim.SGD):
        """By its name one that computes with whole matrices."""

    Orthogonal.__name__ = "Muon"
    own = Orthogonal(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ParameterError, match=r"computes with whole matrices.*zeroweave\.WholeMatrices\(optimizer\)"):
        check_optimizers(given(own), model)
    check_optimizers(given(WholeMatrices(own)), model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    check_optimizers(given(torch.optim.Muon(matrices)), model)
    check_optimizers(given(WholeMatrices(torch.optim.AdamW(model.parameters()))), model)
    check_optimizers([], model)


def test_whole_matrices_do_not_help_everyone(model: nn.Module) -> None:
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ParameterError, match=r"optimizer Adafactor.*\n.*rows and columns of whole parameters"):
        check_optimizers(given(WholeMatrices(torch.optim.Adafactor(model.parameters()))), model)
    with pytest.raises(ParameterError, match=r"optimizer LBFGS.*\n.*calls a closure several times"):
        check_optimizers(given(WholeMatrices(torch.optim.LBFGS(model.parameters()))), model)
    for wrong in (WholeMatrices(WholeMatrices(object())), [object()], {"a": 1}, WholeMatrices([])):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedOptimizer, match=r"not a torch\.optim\.Optimizer"):
            check_optimizers(given(wrong), model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_lists_of_optimizers(model: nn.Module) -> None:
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    check_optimizers(given([first, second]), model)
    check_optimizers(given([first]), model)  # what is in none is not trained, as with one optimizer
    with pytest.raises(ParameterError, match=r"optimizers\[0\] and optimizers\[2\] are one SGD"):
        check_optimizers(given([first, second, first]), model)
    both = torch.optim.AdamW(model.parameters())
    with pytest.raises(ParameterError, match=r"'1.weight' is in two.*\[0\] \(SGD\) and optimizers\[1\] \(AdamW\)"):
        check_optimizers(given([second, both]), model)
    elsewhere = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ParameterError, match="over other parameters than the model's"):
        check_optimizers(given([first, elsewhere]), model)


def test_not_an_optimizer(model: nn.Module) -> None:
    with pytest.raises(ParameterError, match=r"not a torch\.optim\.Optimizer"):
        check_optimizer(object(), model)  # type: ignore[arg-type]


class Own(torch.optim.AdamW):
    """A class of the program's own."""


@pytest.mark.oldest
def test_a_class_that_is_not_known_is_to_be_declared(model: nn.Module) -> None:
    with pytest.raises(
        ParameterError, match=r"optimizer Own.*\n.*not known.*element_wise\(optimizer\).*Whole"
    ) as caught:
        check_optimizer(Own(model.parameters()), model)
    assert "use AdamW, Adam or SGD" in str(caught.value)
    own = Own(model.parameters())
    assert element_wise(own) is own
    check_optimizer(own, model)
    check_optimizers(given(WholeMatrices(Own(model.parameters()))), model)


def test_what_is_known_is_known_by_its_exact_class(model: nn.Module) -> None:
    kinds = {
        kind: kind.__module__ == "schedulefree.adamw_schedulefree"
        for kind in (
            type("AdamWScheduleFree", (torch.optim.AdamW,), {"__module__": "schedulefree.adamw_schedulefree"}),
            type("AdamWScheduleFree", (torch.optim.AdamW,), {"__module__": "elsewhere"}),
            type("Lion", (Lion,), {}),
        )
    }
    assert sorted(kinds.values()) == [False, False, True]
    for kind, known in kinds.items():
        if known:
            check_optimizer(kind(model.parameters()), model)
        else:
            with pytest.raises(ParameterError, match="is not known to be element-wise"):
                check_optimizer(kind(model.parameters()), model)


def test_a_declaration_helps_no_one_that_is_known_not_to_be(model: nn.Module) -> None:
    lamb = type("Lamb", (torch.optim.SGD,), {})
    for kind in (lamb, torch.optim.Adafactor):
        with pytest.raises(ParameterError, match="it is not element-wise"):
            check_optimizer(element_wise(kind(model.parameters())), model)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedLion8bit", "AdamW4bit", "AdamWFp8"])
def test_state_in_blocks_is_refused_by_name(model: nn.Module, name: str) -> None:
    kind = type(name, (torch.optim.AdamW,), {})
    with pytest.raises(ParameterError, match=f"optimizer {name} (.|\n)*blocks of few bits"):
        check_optimizer(element_wise(kind(model.parameters())), model)
