"""Frozen parameters of other libraries' classes stay as they are; what trains has to be a plain parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeroweave as zw
from tests.support.foreign import Coarse, CoarseLinear, adapted, trained
from zeroweave.errors import ParameterError
from zeroweave.parameters.foreign import foreign_parameters, move, own_parameters

EAGER = {"stage": 3, "compile": {"enabled": False}}


def engine_of(model: nn.Module) -> zw.Engine:
    return zw.initialize(model, torch.optim.SGD(trained(model), lr=0.1), EAGER)


@pytest.mark.filterwarnings("ignore:frozen parameters stay")
def test_they_are_the_objects_that_they_were_before_inside_and_after() -> None:
    model = adapted()
    named = dict(model.named_parameters())
    before = {name: (named[name], named[name].data.clone()) for name in foreign_parameters(model)}
    assert list(before) == ["0.base.weight", "1.base.weight", "2.base.weight"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with engine_of(model) as engine:
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        assert all(dict(model.named_parameters())[name] is p for name, (p, _) in before.items())
        served = engine.state_dict()
        assert served.keys() == own_parameters(model).keys() and not served.keys() & before.keys()
        with engine.full_parameters():
            shown = model.state_dict()
            assert shown.keys() == state.keys() and torch.equal(shown["0.base.weight"], state["0.base.weight"])
        engine.load_state_dict({name: value for name, value in state.items() if name in served})
        assert torch.equal(engine.full("1.down.weight"), state["1.down.weight"])
    for name, (parameter, values) in before.items():
        assert dict(model.named_parameters())[name] is parameter and torch.equal(parameter.data, values)
    assert model[3].weight is model[2].base.weight


def test_they_are_listed_once_and_an_export_leaves_them_out(tmp_path: Path) -> None:
    model = adapted()
    with pytest.warns(UserWarning, match=r"frozen parameters stay .*0\.base\.weight.*Coarse") as told:
        engine = engine_of(model)
    assert sum("frozen parameters" in str(each.message) for each in told) == 1
    with engine, pytest.warns(UserWarning, match=r"leaves out frozen parameters .*2\.base\.weight"):
        engine.export(tmp_path / "exported")


def test_what_trains_is_refused_by_name() -> None:
    model = adapted()
    model[1].base.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Odd))
    with pytest.raises(ParameterError, match=r"1\.base\.weight: is a tensor subclass .*trained"):
        engine_of(model)


class Odd(torch.Tensor):
    pass


def test_an_optimizer_over_them_is_refused_by_name() -> None:
    model = adapted()
    parameters = [p for p in model.parameters() if not isinstance(p, Coarse) or p is model[0].base.weight]
    with pytest.raises(ParameterError, match=r"param_groups\[0\].*without frozen ones of other libraries"):
        zw.initialize(model, torch.optim.SGD(parameters, lr=0.1), EAGER)


def test_a_callable_is_given_the_others() -> None:
    model = adapted()
    engine = zw.initialize(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), EAGER)
    assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == len(own_parameters(model))
    engine.destroy()


def test_they_move_as_they_move_themselves() -> None:
    model = adapted()
    tied = CoarseLinear(8, 8)
    tied.weight = model[0].base.weight
    model.append(tied)
    move(model, torch.device("meta"))
    moved = [p for p in model.parameters() if isinstance(p, Coarse)]
    assert len(moved) == 3 and all(p.is_meta and p.scale.is_meta for p in moved)
    assert tied.weight is model[0].base.weight and not model[0].down.weight.is_meta
