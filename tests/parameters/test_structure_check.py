"""Models that cannot be sharded: one error that names all offenders, and nothing changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zeroweave.errors import ParameterError
from zeroweave.parameters.module_parameters import rest
from zeroweave.parameters.structure_check import check_structure
from zeroweave.parameters.stub import StubStatus

pytestmark = pytest.mark.oldest


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def refusal(model: nn.Module) -> str:
    with pytest.raises(ParameterError, match="nothing was changed") as caught:
        check_structure(model)
    return str(caught.value)


def test_ordinary_models_pass() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.LSTM(4, 4), nn.PReLU())
    model[0].weight.requires_grad_(False)
    model[1].to(memory_format=torch.channels_last)
    model.none = nn.Parameter(torch.zeros(0, 3))
    model.number = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    check_structure(model)
    held = [reference() for reference in model[3]._flat_weight_refs]
    assert [id(p) for p in held] == [id(p) for p in model[3].parameters()]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    check_structure(tied)
    check_structure(nn.ReLU())


def test_after_a_forward_and_backward_whose_loss_is_gone_or_lives() -> None:
    model = mlp()
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    model.zero_grad()
    check_structure(model)
    del loss
    check_structure(model)


def test_all_offenders_are_named_at_once() -> None:
    """Grouped by reason, each with its cure; the model is as before."""
    model = mlp()
    model.extra = nn.Linear(4, 4)
    loss = model[2](model[0](torch.randn(2, 4))).sum()
    reference = weakref.ref(model[0].weight)
    model[0].bias.grad = torch.zeros(4)
    model.extra.weight.register_hook(lambda g: g)
    model.extra.bias.register_post_accumulate_grad_hook(lambda p: None)
    text = refusal(model)
    assert "2.weight: in a live autograd graph; delete earlier losses" in text
    assert "  0.weight: weakly referenced" in text
    assert "  0.bias: has a gradient; call model.zero_grad()" in text
    assert "extra.weight" not in text, "tensor hooks are taken over"
    assert "extra.bias: has hooks of register_post_accumulate_grad_hook" in text and "use register_hook" in text
    loss.backward()
    assert reference() is model[0].weight and all(p.grad is not None for p in model[2].parameters())


def test_frozen_parameters_saved_by_a_live_graph() -> None:
    model = mlp().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    out = model(x)
    assert "0.weight, 2.weight: in a live autograd graph" in refusal(model)
    out.sum().backward()
    assert x.grad is not None
    del out
    check_structure(model)


def test_garbage_cycles_do_not_count() -> None:
    model = mlp()
    cycle: list[object] = [model(torch.randn(2, 4))]
    cycle.append(cycle)
    del cycle
    check_structure(model)


def test_memory_shared_with_a_buffer_or_another_parameter() -> None:
    model = mlp()
    model.register_buffer("alias", model[0].weight.detach()[1:])
    model.one = nn.Parameter(torch.zeros(8))
    model.two = nn.Parameter(model.one.detach()[6:])
    model.apart = nn.Parameter(torch.zeros(8)[:4])
    text = refusal(model)
    assert "0.weight: shares memory with the buffer alias; clone" in text
    assert "  one: shares memory with two" in text and "  two: shares memory with one" in text
    assert "apart" not in text


def test_views_of_one_tensor_that_do_not_overlap_pass() -> None:
    flat = torch.zeros(10)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:])
    model.register_buffer("c", torch.zeros(3))
    check_structure(model)


class Sub(torch.Tensor):
    pass


def sparse_parameter() -> nn.Parameter:
    return nn.Parameter(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Parameter(torch.zeros(2, 2).as_subclass(Sub)), "tensor subclass (Sub)"),
        (sparse_parameter, "layout torch.sparse_coo"),
        (lambda: nn.Parameter(torch.zeros(4, 4)[:, :2]), "make it contiguous"),
        (lambda: nn.Parameter(torch.zeros(1).expand(4)), "make it contiguous"),
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "dtype torch.complex64"),
        (lambda: nn.UninitializedParameter(), "no shape yet"),
    ],
)
def test_parameters_of_other_kinds(make: Callable[[], nn.Parameter], reason: str) -> None:
    model = mlp()
    model.odd = make()
    text = refusal(model)
    assert reason in text and "  odd: " in text and "0.weight" not in text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(1).expand(4), "an expanded buffer"),
        (lambda: torch.zeros(3, 1).expand(3, 4), "an expanded buffer"),
        (lambda: torch.eye(3).to_sparse(), "a buffer of layout torch.sparse_coo"),
        (lambda: torch.nn.parameter.UninitializedBuffer(), "a buffer without a shape"),
    ],
)
def test_buffers_that_cannot_be_shared(make: Callable[[], torch.Tensor], reason: str) -> None:
    model = mlp()
    model[0].register_buffer("odd", make())
    model.register_buffer("other", make(), persistent=False)
    text = refusal(model)
    assert f"  other, 0.odd: is {reason}" in text and "weight" not in text


def test_buffers_with_gaps_or_one_row_pass() -> None:
    model = mlp()
    model.register_buffer("slice", torch.zeros(4, 4)[:, ::2])
    model.register_buffer("positions", torch.arange(8).expand(1, -1))
    model.register_buffer("empty", torch.zeros(0, 2))
    check_structure(model)


def test_embeddings_with_gradients_or_weights_of_their_own_ways() -> None:
    model = nn.Sequential(
        nn.Embedding(4, 4, sparse=True),
        nn.EmbeddingBag(4, 4, max_norm=1.0),
        nn.EmbeddingBag(4, 4, sparse=True),
        nn.Embedding(4, 4),
    )
    text = refusal(model)
    assert "0.weight, 2.weight: has sparse gradients" in text
    assert "1.weight: is renormalised inside forward (max_norm)" in text
    assert "3.weight" not in text


def test_lazy_modules() -> None:
    assert "0.weight, 0.bias: has no shape yet" in refusal(nn.Sequential(nn.LazyLinear(3)))


def test_old_weight_norm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    assert "torch.nn.utils.parametrizations" in refusal(model)
    check_structure(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


def test_wrapped_models() -> None:
    assert "the model: compiled with torch.compile" in refusal(torch.compile(mlp()))
    inner = mlp()
    inner[2] = torch.compile(inner[2])
    assert "2: compiled with torch.compile" in refusal(inner)
    compiled = mlp()
    compiled[0].compile()
    assert "0: compiled with module.compile()" in refusal(compiled)
    assert "the model: wrapped in DataParallel" in refusal(nn.DataParallel(mlp()))


def test_wrappers_are_known_by_their_class() -> None:
    """Those that need a process group to build are stood in for by a class of the same name and module."""
    for name, reason in (("DistributedDataParallel", "wrapped in"), ("FSDPModule", "sharded by fully_shard")):
        kind = type(name, (nn.Sequential,), {"__module__": "torch.somewhere"})
        assert reason in refusal(kind(nn.Linear(2, 2)))
        check_structure(type(name, (nn.Sequential,), {"__module__": "mine"})(nn.Linear(2, 2)))
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for known in (FSDPModule, FullyShardedDataParallel, DistributedDataParallel):
        assert known.__module__.startswith("torch.")


def test_a_model_that_has_an_engine() -> None:
    model = mlp()
    places = rest(model, StubStatus(), lambda name, p: nn.Parameter(p.detach().clone()))
    assert refusal(model).splitlines()[1:] == [
        "  the model: has an engine already; use it, or call its destroy() first"
    ]
    places.restore(lambda name: torch.zeros(places.names[name].shape))
    check_structure(model)
