"""The exchange of parameters for stubs and back: all or nothing, in every place, cheap, and undone by restore."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.parameters.resting import NAME, Resting, make_resting, real_of
from zeroweave.errors import ParameterError
from zeroweave.parameters.module_parameters import rest
from zeroweave.parameters.structure_check import check_structure
from zeroweave.parameters.stub import AtRest, Showing, StubStatus

pytestmark = pytest.mark.oldest


def test_earlier_references_refuse_while_the_module_computes(resting: Resting) -> None:
    x = torch.randn(3, 8)
    resting.parameters.show()
    resting.parameters.show()
    expected = resting.model(x)
    assert type(resting.model[0].weight) is nn.Parameter and resting.status.showing is Showing.REAL
    for p in (resting.list[0], resting.optimizer.param_groups[0]["params"][0]):
        with pytest.raises(ParameterError, match="reach it through the module"):
            p.norm()
    with pytest.raises(ParameterError, match="state_dict"):
        resting.model.state_dict()
    resting.parameters.show_stubs()
    resting.parameters.show_stubs()
    assert resting.model[0].weight is resting.list[0] and resting.status.showing is Showing.STUBS
    with pytest.raises(ParameterError) as caught:
        resting.list[0].norm()
    assert "through the module" not in str(caught.value)
    resting.parameters.show()
    assert torch.equal(resting.model(x), expected)


def test_full_parameters_serve_independent_state(resting: Resting) -> None:
    resting.parameters.show(showing=Showing.OPEN)
    served = resting.model.state_dict()
    kept = resting.model.state_dict(keep_vars=True)
    real = resting.model[0].weight
    assert torch.equal(served[NAME], real) and torch.equal(kept[NAME], real)
    assert len({t.data_ptr() for t in (served[NAME], kept[NAME], real)}) == 3 and not served[NAME].requires_grad
    resting.model.load_state_dict({name: torch.zeros_like(t) for name, t in served.items()})
    assert resting.model[0].weight is real and not real.any()
    with pytest.raises(ParameterError, match="assign=True"):
        resting.model.load_state_dict(served, assign=True)


def test_other_parameters_can_be_shown(resting: Resting) -> None:
    others = {name: nn.Parameter(torch.zeros(stub.shape)) for name, stub in resting.parameters.names.items()}
    resting.parameters.show(others)
    assert resting.model[0].weight is others[NAME] and not resting.model(torch.randn(2, 8)).any()
    resting.parameters.show()
    assert resting.model[0].weight.any()
    resting.parameters.show_stubs()


def test_views_of_the_real_ones_can_be_kept(resting: Resting) -> None:
    resting.parameters.show()
    real = resting.model[0].weight
    resting.parameters.show_stubs()
    views = resting.parameters.views()
    resting.parameters.show(views, Showing.OPEN)
    assert list(views) == list(resting.parameters.names) and resting.model[0].weight is views[NAME] is not real
    with torch.no_grad():
        views[NAME].fill_(3.0)
    assert (real == 3.0).all() and views[NAME].requires_grad
    resting.parameters.show_stubs()
    kept = weakref.ref(views[NAME])
    views.clear()
    assert kept() is None, "the parameters let go of them"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.embedding(x))


def test_tied_parameters_are_one_with_several_places() -> None:
    resting = make_resting(Tied())
    model, parameters = resting.model, resting.parameters
    assert list(parameters.names) == ["embedding.weight"]
    assert parameters.aliases == {"head.weight": "embedding.weight", "again.weight": "embedding.weight"}
    parameters.show()
    assert model.embedding.weight is model.head.weight and type(model.head.weight) is nn.Parameter
    model(torch.tensor([1, 2])).sum().backward()
    parameters.show_stubs()
    assert model.embedding.weight is model.head.weight is resting.list[0]
    parameters.restore(lambda name: torch.ones(6, 4))
    assert model.embedding.weight is model.head.weight is resting.list[0] and type(resting.list[0]) is nn.Parameter


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_compute_with_the_real_parameters(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 8, num_layers=2, bidirectional=True)
    x = torch.randn(5, 2, 4)
    expected = model(x)[0].detach()
    resting = make_resting(model)
    for _ in range(2):
        with pytest.raises(ParameterError):
            model(x)
        resting.parameters.show()
        out = model(x)[0]
        assert torch.equal(out, expected)
        out.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        resting.parameters.show_stubs()
    resting.parameters.restore(lambda name: torch.zeros(resting.parameters.names[name].shape))
    assert not model(x)[0].any()
    assert model._flat_weights[0] is model.weight_ih_l0
    model.weight_ih_l0 = nn.Parameter(torch.ones_like(model.weight_ih_l0))  # RNNs notice again
    model(x)


def test_compiled_code_survives_the_exchange() -> None:
    torch.manual_seed(0)
    resting = make_resting(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    counter = CompileCounter()
    compiled = torch.compile(resting.model, backend=counter)
    for _ in range(4):
        resting.parameters.show()
        compiled(torch.randn(3, 8)).sum().backward()
        assert resting.model[0].weight.grad is not None
        resting.parameters.show_stubs()
    assert counter.frame_count == 1


def test_a_replaced_entry_is_named_and_nothing_changes(resting: Resting) -> None:
    mine = nn.Parameter(torch.zeros(16, 8))
    resting.model[0].weight = mine
    del resting.model[3].bias
    with pytest.raises(ParameterError, match=r"^\[ZW\d+\] 0\.weight, 3\.bias: replaced or deleted"):
        resting.parameters.show()
    assert type(resting.model[3].weight) is AtRest and resting.status.showing is Showing.STUBS


def test_an_entry_replaced_while_shown_does_not_keep_the_others_there(resting: Resting) -> None:
    resting.parameters.show()
    mine = nn.Parameter(torch.zeros(16, 8))
    resting.model[0].weight = mine
    with pytest.raises(ParameterError, match=r"^\[ZW\d+\] 0\.weight: replaced"):
        resting.parameters.show_stubs()
    assert resting.model[0].weight is mine and type(resting.model[3].weight) is AtRest
    resting.parameters.restore(lambda name: torch.ones(resting.parameters.names[name].shape))
    assert resting.model[0].weight is mine and torch.equal(resting.model[3].weight, torch.ones(4, 16))
    assert torch.equal(resting.list[0], torch.ones(16, 8))


def test_restore_gives_ordinary_parameters_back() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[1].bias.requires_grad_(False)
    model[0].weight.tag = "of the user"  # type: ignore[attr-defined]
    before = copy.deepcopy(model)
    resting = make_resting(model)
    assert resting.list[0].tag == "of the user"  # type: ignore[attr-defined]
    resting.parameters.show()
    assert model[0].weight.tag == "of the user"
    kept: dict[str, torch.Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        kept[NAME] += 1
    resting.parameters.restore(lambda name: kept[name])
    resting.parameters.restore(lambda name: kept[name])  # nothing left to do

    assert all(type(p) is nn.Parameter for p in resting.list)
    assert [id(p) for p in model.parameters()] == [id(p) for p in resting.list]
    assert [p.requires_grad for p in resting.list] == [True, True, True, False]
    assert torch.equal(resting.list[0], before[0].weight + 1) and vars(resting.list[0]) == {"tag": "of the user"}
    model(torch.randn(2, 8)).sum().backward()
    resting.optimizer.step()
    assert model.state_dict().keys() == before.state_dict().keys()
    model.load_state_dict(before.state_dict(), assign=True)
    copy.deepcopy(model)
    pickle.dumps(model)
    check_structure(before)


def test_a_model_can_rest_again_after_it_was_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LSTM(16, 4))
    for _ in range(2):
        resting = make_resting(model)
        values = {name: torch.zeros(stub.shape) for name, stub in resting.parameters.names.items()}
        resting.parameters.restore(lambda name, values=values: values[name])


def test_restore_can_be_continued(resting: Resting) -> None:
    def failing(name: str) -> torch.Tensor:
        if name.startswith("3"):
            raise OSError("lost")
        return torch.ones(resting.parameters.names[name].shape)

    with pytest.raises(OSError, match="lost"):
        resting.parameters.restore(failing)
    assert type(resting.model[0].weight) is nn.Parameter and type(resting.model[3].weight) is AtRest
    resting.parameters.restore(lambda name: torch.zeros(resting.parameters.names[name].shape))
    assert torch.equal(resting.model[0].weight, torch.ones(16, 8)) and not resting.model[3].weight.any()


def test_restore_names_weakly_referenced_stubs(resting: Resting) -> None:
    reference = weakref.ref(resting.list[0])
    with pytest.raises(ParameterError, match=r"0\.weight are weakly referenced"):
        resting.parameters.restore(lambda name: torch.zeros(1))
    assert all(type(p) is AtRest for p in resting.list)
    del reference
    resting.parameters.restore(lambda name: torch.zeros(resting.parameters.names[name].shape))


def test_all_rest_or_none() -> None:
    """A parameter that turns out not to be swappable puts the others back; the model goes on as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    reference = weakref.ref(model[2].weight)
    with pytest.raises(ParameterError, match=r"'2\.weight' cannot be put to rest; nothing was changed"):
        rest(model, StubStatus(), real_of)
    del reference
    assert all(type(p) is nn.Parameter for p in parameters) and model[0].weight is parameters[0]
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
    model[2](model[1](model[0](x))[0]).sum().backward()
    assert all(p.grad is not None for p in parameters)


def test_an_error_of_the_callback_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def real(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name == "1.bias":
            raise MemoryError("no room")
        return real_of(name, parameter)

    with pytest.raises(MemoryError, match="no room"):
        rest(model, StubStatus(), real)
    model(torch.randn(2, 4)).sum().backward()


def test_a_forward_and_backward_before_does_not_poison_the_real_ones() -> None:
    """The loss still lives, so autograd knows the old objects: the real ones are new."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    model.zero_grad()
    check_structure(model)
    resting = make_resting(model)
    resting.parameters.show()
    model(torch.randn(2, 4)).sum().backward()
    assert loss.grad_fn is not None


def test_stubs_take_over_what_the_real_ones_have() -> None:
    """Dtype, stride and device are those that the engine computes with."""
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    check_structure(model)
    rest(model, StubStatus(), lambda name, p: nn.Parameter(p.detach().to(torch.bfloat16).contiguous()))
    assert model.weight.dtype == torch.bfloat16 and model.weight.stride() == (36, 9, 3, 1)


def test_stubs_are_freed_with_the_model() -> None:
    resting = make_resting(nn.Sequential(nn.Linear(4, 4)))
    stub = weakref.ref(resting.model[0])
    del resting
    gc.collect()
    assert stub() is None


def test_an_exchange_is_cheap() -> None:
    """400 parameters take 0.03 ms of this thread's time; the bound leaves room for a slower machine."""
    resting = make_resting(nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)]))
    best = float("inf")
    for _ in range(50):
        begin = time.thread_time()
        resting.parameters.show()
        best = min(best, time.thread_time() - begin)
        resting.parameters.show_stubs()
    assert best < 0.5e-3
