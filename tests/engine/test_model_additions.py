"""What comes to a model beside its engine: parameters, which are refused, and modules and names without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.test_model_changes import Block, initialized, made, train
from zeroweave.errors import ParameterError


def head(model: Any) -> None:
    model.layers.append(Block())


def parameter(model: Any) -> None:
    """Beside a module that may come."""
    model.layers.append(nn.Dropout(0.0))
    model.layers[0].shift = nn.Parameter(torch.ones(8))


def in_an_empty_place(model: Any) -> None:
    model.spare.bias = nn.Parameter(torch.ones(8))


def in_the_place_of_one_without_parameters(model: Any) -> None:
    model.drop = nn.Linear(8, 8)


def in_the_second_place_of_one(model: Any) -> None:
    model.pair[1] = nn.Linear(8, 8)


def behind_one_that_went(model: Any) -> None:
    """Lists and sequences have another dictionary of children then."""
    del model.empty[0]
    model.empty[0] = nn.Linear(8, 8)


def inside_of_one_that_came(model: Any) -> None:
    model.late.append(nn.Sequential(nn.Linear(8, 8).requires_grad_(False)))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("add", "name", "take_away"),
    [
        (
            head,
            r"layers\.2\.scale, layers\.2\.linear\.weight, .*, layers\.2\.norm\.bias",
            lambda model: model.layers.pop(-1),
        ),
        (parameter, r"layers\.0\.shift", lambda model: delattr(model.layers[0], "shift")),
        (in_an_empty_place, r"spare\.bias", lambda model: setattr(model.spare, "bias", None)),
        (
            in_the_place_of_one_without_parameters,
            r"drop\.weight, drop\.bias",
            lambda model: setattr(model, "drop", nn.Dropout(0.0)),
        ),
        (
            in_the_second_place_of_one,
            r"pair\.1\.weight, pair\.1\.bias",
            lambda model: model.pair.__setitem__(1, model.pair[0]),
        ),
        (
            behind_one_that_went,
            r"empty\.0\.weight, empty\.0\.bias",
            lambda model: setattr(model, "empty", nn.ModuleList([nn.ReLU(), nn.ReLU()])),
        ),
        (inside_of_one_that_came, r"late\.0\.0\.weight, late\.0\.0\.bias", lambda model: model.late.pop(-1)),
    ],
)
def test_what_is_added_is_named(
    stage: int, add: Callable[[Any], None], name: str, take_away: Callable[[Any], Any]
) -> None:
    """It would have values of its own on each rank, and nobody would train or save it."""
    model = made()
    model.spare, model.drop = nn.Linear(8, 8, bias=False), nn.Dropout(0.0)
    model.empty, model.pair = nn.ModuleList([nn.ReLU(), nn.ReLU()]), nn.ModuleList([nn.Linear(8, 8)] * 2)
    with initialized(model, stage=stage) as engine:
        model.late = nn.Sequential()  # what has no parameters may come, and what it has may go
        train(model, engine)
        add(model)
        for call in (
            lambda: engine(torch.ones(4, 8)),
            engine.state_dict,
            lambda: list(engine.stream_state_dict()),
            lambda: engine.full_parameters().__enter__(),
        ):
            with pytest.raises(
                ParameterError, match=rf"^\[ZW\d+\] {name}: added to the model since zeroweave.initialize"
            ):
                call()
            engine.zero_grad()
        take_away(model)
        del model.late
        train(model, engine)
        assert engine.state_dict().keys() == model_keys(model)
        model.late = nn.Sequential()
        add(model)
        with pytest.raises(ParameterError, match=rf"^\[ZW\d+\] {name}: added to the model since zeroweave.initialize"):
            engine(torch.ones(4, 8))
    train(model)  # the engine has ended, and the model is an ordinary one, with what was added


def renamed(model: Any) -> None:
    del model.tail[0]


def scripted(model: Any) -> None:
    model.late = torch.jit.script(nn.Sequential(nn.GELU()))


def named_again(model: Any) -> None:
    model.layers[0].again = model.head


def exchanged(model: Any) -> None:
    model.tail[0] = nn.Dropout(0.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("change", [renamed, scripted, named_again, exchanged])
def test_what_brings_no_parameters_may_come_and_go(change: Callable[[Any], None]) -> None:
    """State dicts have the names of `initialize`."""
    plain, model = made(), made()
    for each in (plain, model):
        torch.manual_seed(1)
        each.tail = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 8))
        each.head = nn.Sequential(each.head, each.tail)
    names = model_keys(model)
    with initialized(model) as engine:
        assert train(model, engine) == train(plain)
        for each in (plain, model):
            change(each)
        assert train(model, engine) == train(plain)
        found = engine.state_dict()
    assert found.keys() == names
    assert torch.equal(found["tail.1.weight"], plain.tail[-1].weight)


def model_keys(model: nn.Module) -> set[str]:
    """Those of its state dicts."""
    return {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def test_functional_call_needs_a_model_without_an_engine() -> None:
    model, other = made(), made().eval()
    with initialized(model) as engine, engine.full_parameters() as parameters, torch.no_grad():
        twice = {name: 2.0 * value for name, value in parameters.items()}
        with pytest.raises(ParameterError, match=r"copy_.*torch.func.functional_call.*without an engine"):
            torch.func.functional_call(engine.module, twice, (torch.ones(4, 8),))
        assert torch.func.functional_call(other, twice, (torch.ones(4, 8),)).shape == (4, 8)


class Keeping(nn.Linear):
    """Its forward gives a parameter another name."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.weight
        return torch.nn.functional.linear(x, self.last, self.bias)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mode", [{"enabled": False}, pytest.param({"lower": "aot_eager"}, marks=pytest.mark.matrix)])
def test_a_forward_may_give_its_parameters_other_names(stage: int, mode: dict[str, Any]) -> None:
    plain, model = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(Keeping(8, 8))
    model.load_state_dict(plain.state_dict())
    with initialized(model, stage=stage, compile=mode) as engine:
        assert train(model, engine) == train(plain)
        found = engine.state_dict()
        assert list(found) == ["0.weight", "0.bias"] and torch.equal(found["0.weight"], plain[0].weight)
