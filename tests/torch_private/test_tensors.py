"""Stubs, owners, hooks and storages."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.support.reference import NORM
from zeroweave._torch.foreach import foreach_add_, foreach_maxima, foreach_norms
from zeroweave._torch.modules import forward_pre_hooks, is_compiled_in_place
from zeroweave._torch.storages import lent, owners, storage_use_count, use_count
from zeroweave._torch.tensors import (
    exchange,
    mark_as_parameter,
    metadata_getters,
    post_accumulate_hooks,
    put_hooks,
    tensor_hooks,
    wrapper_like,
)

pytestmark = pytest.mark.oldest


def test_stubs_can_be_made_and_counted_as_parameters() -> None:
    class Stub(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: object, *_: object) -> object:
            raise AssertionError(func)

    like = nn.Parameter(torch.zeros(2, 3).t())
    stub = wrapper_like(Stub, like)
    assert type(stub) is Stub and stub.shape == (3, 2) and stub.stride() == like.stride() and stub.requires_grad
    assert not isinstance(stub, nn.Parameter)
    mark_as_parameter(stub)
    assert isinstance(stub, nn.Parameter)
    assert [getter(like) for getter in metadata_getters()] == [0, None, None, 0]
    with torch.DisableTorchFunctionSubclass():
        assert stub.numel() == 6


def test_owners_of_a_parameter_are_counted() -> None:
    """What the check before the exchange relies on: more than 2 means a live graph."""
    layer = nn.Linear(2, 2)
    assert use_count(layer.weight) == 1
    loss = layer(torch.ones(1, 2, requires_grad=True)).sum()
    assert use_count(layer.weight) > 2
    loss.backward()
    assert use_count(layer.weight) <= 2
    del loss
    assert use_count(layer.weight) == 1


def test_owners_are_counted_but_for_graphs() -> None:
    p = nn.Parameter(torch.ones(3))
    both = [p, nn.Parameter(torch.ones(2))]
    base, other = owners(both)
    graphs = [(p * 2).sum(), (p * 3).sum()]
    assert owners(both) == [base, other], "an AccumulateGrad node alone"
    kept = [p]
    assert owners(both) == [base + 1, other]
    graphs[0].backward()
    assert owners(both) == [base + 1, other]
    graphs.clear()
    assert owners(both) == [base + 1, other]
    kept.clear()
    saved = p.pow(2).sum()
    assert owners(both)[0] > base, "C++ alone"
    del saved
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        saved = p.pow(2).sum()
    assert owners(both)[0] > base
    del saved
    alive = weakref.ref(p)
    assert owners(both) == [base, other], "a weak one"
    del alive


def test_graphs_and_hooks_stay_with_the_content_that_is_exchanged() -> None:
    ran = []
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    vars(other)["mark"] = 1
    p.register_post_accumulate_grad_hook(lambda t: ran.append("first"))
    saves, saves_nothing = p.pow(2).sum(), (p * 3).sum()
    exchange(p, other)
    assert vars(p) == {"mark": 1} and not vars(other)
    assert p.sum() == 0 and other.sum() == 3
    other.register_post_accumulate_grad_hook(lambda t: ran.append("second"))
    (saves + saves_nothing + p.sum()).backward()
    assert ran == ["first", "second"], "one that is added later is added"
    assert p.grad is not None and other.grad is not None
    assert p.grad.tolist() == [1.0] * 3 and other.grad.tolist() == [5.0] * 3
    del saves, saves_nothing
    assert owners(p) == owners(other)


def test_lent_memory_has_no_part_in_the_storage() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.zeros(6, dtype=dtype)
        users = storage_use_count(tensor.untyped_storage())
        loan = lent(tensor)
        assert storage_use_count(tensor.untyped_storage()) == users
        loan[2] = 1
        assert tensor.tolist() == [0, 0, 1, 0, 0, 0] and loan.shape == tensor.shape
    assert lent(torch.zeros(0)).numel() == 0
    scalar = torch.tensor(3.0)
    assert lent(scalar).tolist() == [3.0]


def test_hooks_on_tensors_and_modules_are_seen() -> None:
    layer = nn.Linear(2, 2)
    assert not tensor_hooks(layer.weight) and not post_accumulate_hooks(layer.weight)
    layer.weight.register_hook(lambda gradient: gradient)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(tensor_hooks(layer.weight)) == len(post_accumulate_hooks(layer.weight)) == 1
    before = [*tensor_hooks(layer.weight)]
    handle = layer.weight.register_hook(lambda gradient: gradient)
    assert [*tensor_hooks(layer.weight)][:1] == before and len({*tensor_hooks(layer.weight)}) == 2
    kept = tensor_hooks(layer.weight)
    handle.remove()
    assert [*kept] == before, "handles remove hooks from this very object"

    def hook(*_: object) -> None: ...

    layer.register_forward_pre_hook(hook)
    assert forward_pre_hooks(layer) == (hook,)
    assert not is_compiled_in_place(layer)
    layer.compile()
    assert is_compiled_in_place(layer)


def test_hooks_that_are_put_run_and_can_be_removed() -> None:
    hooked, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    handle = hooked.register_hook(lambda gradient: gradient * 2)
    hooks = tensor_hooks(hooked)
    put_hooks(other, hooks)
    other.register_hook(lambda gradient: gradient + 1)
    for expected in (3.0, 2.0):
        other.grad = None
        other.sum().backward()
        assert other.grad is not None and other.grad.tolist() == [expected] * 2
        handle.remove()
    put_hooks(other, OrderedDict())
    other.grad = None
    other.sum().backward()
    assert other.grad.tolist() == [1.0, 1.0]


def test_sums_of_two_dtypes_keep_that_of_the_target() -> None:
    sums = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    foreach_add_(sums, [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((2,), 2.0)])
    assert [s.tolist() for s in sums] == [[3.0] * 3, [3.0] * 2]
    assert [s.dtype for s in sums] == [torch.float32, torch.bfloat16]


def test_several_tensors_at_once() -> None:
    tensors = [torch.ones(3), torch.full((2,), 2.0), torch.zeros(0)]
    assert [norm.item() for norm in foreach_norms(tensors)] == pytest.approx([3**0.5, 8**0.5, 0.0])
    rounded = foreach_norms([torch.ones(1000, dtype=torch.bfloat16)])[0]
    assert rounded.dtype == torch.float32 and rounded.item() == pytest.approx(1000**0.5, rel=NORM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maxima_show_what_is_not_finite(dtype: torch.dtype) -> None:
    inf, nan, most = float("inf"), float("nan"), torch.finfo(dtype).max
    rows = [[1.0, -3.0], [most, -most], [-inf, 1.0], [nan, inf], [1.0] * 999 + [nan]]
    maxima = foreach_maxima([torch.tensor(row, dtype=dtype) for row in rows])
    assert maxima[0].item() == 3.0 and maxima[1].item() == most and maxima[2].item() == inf
    assert [bool(maximum.isfinite()) for maximum in maxima] == [True, True, False, False, False]
