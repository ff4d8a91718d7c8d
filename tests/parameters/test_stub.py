"""Parameters at rest: every use of a value is refused by name, by every way to reach the parameter."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.parameters.resting import NAME, ROUTES, Resting, make_resting
from zeroweave.errors import ParameterError
from zeroweave.parameters.stub import AtRest, Showing

pytestmark = pytest.mark.oldest

WAY_OUT = r"engine\.full_parameters\(\).*engine\.state_dict\(\)"


def no_grad(f: Callable[[], object]) -> object:
    with torch.no_grad():
        return f()


TOUCHES: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda p: p.norm(),
    "item": lambda p: p[0, 0].item(),
    "clamp_": lambda p: p.clamp_(0),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(16, 8)),
    "init": lambda p: nn.init.normal_(p),
    "l2": lambda p: (p**2).sum(),
    "detach": lambda p: p.detach(),
    "data_ptr": lambda p: p.data_ptr(),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: numpy.asarray(p),
    "tolist": lambda p: p.tolist(),
    "storage": lambda p: p.untyped_storage(),
    "copy_": lambda p: no_grad(lambda: p.copy_(torch.zeros(16, 8))),
    "copy from": lambda p: torch.zeros(16, 8).copy_(p),
    "eq": lambda p: p == 1,
    "bool": lambda p: bool(p),
    "view": lambda p: p.view(-1),
    "t": lambda p: p.T,
    "share": lambda p: p.share_memory_(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "isnan": lambda p: torch.isnan(p),
    "matmul": lambda p: torch.randn(2, 16) @ p,
    "iterate": lambda p: list(p),
    "contains": lambda p: 1.0 in p,
    "float": lambda p: float(p),
    "to": lambda p: p.to(torch.float64),
    "type to": lambda p: p.type(torch.float64),
    "cpu": lambda p: p.cpu(),
    "zeros_like": lambda p: torch.zeros_like(p),
    "Parameter": lambda p: nn.Parameter(p),
    "linear": lambda p: nn.functional.linear(torch.randn(2, 8), p),
    "tensor": lambda p: torch.tensor(p),
    "operator": lambda p: torch.ops.aten.clone(p),
    "setstate": lambda p: p.__setstate__(()),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "out": lambda p: no_grad(lambda: torch.add(torch.ones(16, 8), 1, out=p)),
    "stack": lambda p: torch.stack([p]),
    "swap": lambda p: p.module_load(torch.zeros(16, 8)),
    "set_": lambda p: no_grad(lambda: p.set_(torch.zeros(16, 8))),
    "resize_": lambda p: p.resize_(3),
    "vector_norm": lambda p: torch.linalg.vector_norm(p),
    "clone": lambda p: p.clone(),
    "half": lambda p: p.half(),
    "save in a dict": lambda p: torch.save({"w": p}, io.BytesIO()),
    "write": lambda p: no_grad(lambda: p.mul_(0.5)),
    "write data": lambda p: p.data.zero_(),
    "foreach write": lambda p: torch._foreach_mul_([p], 2.0),
    "equal": lambda p: torch.equal(p, torch.zeros(16, 8)),
}


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize("touch", TOUCHES)
def test_values_are_refused_by_name_with_the_way_out(resting: Resting, touch: str) -> None:
    for route in ROUTES:
        with pytest.raises(ParameterError, match=f"{re.escape(repr(NAME))}.*{WAY_OUT}"):
            TOUCHES[touch](resting.by(route))


@pytest.mark.parametrize("route", ROUTES)
def test_metadata_is_answered(resting: Resting, route: str) -> None:
    p = resting.by(route)
    assert type(p) is AtRest and isinstance(p, nn.Parameter) and p in set(resting.list)
    assert p.shape == (16, 8) and p.dtype == torch.float32 and p.device.type == "cpu" and p.layout == torch.strided
    assert p.requires_grad and p.is_leaf and p.grad_fn is None and p.grad is None
    assert p.numel() == torch.numel(p) == p.nelement() == 128 and len(p) == 16 and p.size(1) == 8
    assert p.stride() == (8, 1) and p.is_contiguous() and p.nbytes == 512 and p.element_size() == p.itemsize == 4
    assert p.is_floating_point() and torch.is_floating_point(p) and not p.is_complex() and p.ndim == p.dim() == 2
    assert p.type() == "torch.FloatTensor" and not p.is_meta and not p.is_cuda and "shape" in dir(p)
    for text in (repr(p), str(p), f"{p}", f"{p:>200}"):
        assert f"Parameter {NAME!r}, sharded: shape (16, 8), torch.float32, cpu" in text


def test_modules_are_printed_and_counted(resting: Resting) -> None:
    assert "Linear(in_features=8" in str(resting.model)
    assert sum(p.numel() for p in resting.model.parameters()) == 8 * 16 + 16 + 32 + 64 + 4
    assert list(resting.parameters.names) == [name for name, _ in resting.model.named_parameters()]
    assert not resting.parameters.aliases


def touch_module(what: str, model: nn.Module) -> object:
    return {
        "forward": lambda: model(torch.randn(3, 8)),
        "to dtype": lambda: model.to(torch.float64),
        "to device": lambda: model.to("cpu"),
        "half": lambda: model.half(),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "save": lambda: torch.save(model, io.BytesIO()),
        "to_empty": lambda: model.to_empty(device="cpu"),
        "share_memory": lambda: model.share_memory(),
        "state_dict": lambda: model.state_dict(),
        "keep_vars": lambda: model.state_dict(keep_vars=True),
        "state_dict of a child": lambda: model[0].state_dict(),
        "load": lambda: model.load_state_dict({NAME: torch.zeros(16, 8)}, strict=False),
        "load nothing": lambda: model.load_state_dict({}, strict=False),
        "assign": lambda: model.load_state_dict({NAME: torch.zeros(16, 8)}, strict=False, assign=True),
        "load a child": lambda: model[0].load_state_dict({"weight": torch.zeros(16, 8)}, strict=False),
    }[what]()


@pytest.mark.parametrize(
    "what",
    "forward|to dtype|to device|half|deepcopy|pickle|save|to_empty|share_memory|state_dict|keep_vars|"
    "state_dict of a child|load|load nothing|assign|load a child".split("|"),
)
def test_whole_module_uses_are_refused(resting: Resting, what: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(repr(NAME))):
        touch_module(what, resting.model)
    assert all(type(p) is AtRest for p in resting.model.parameters()), "nothing half done"


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_are_none_until_some_wait(resting: Resting, route: str) -> None:
    p = resting.by(route)
    assert p.grad is None
    p.grad = None
    resting.model.zero_grad()
    resting.optimizer.zero_grad()
    resting.optimizer.zero_grad(set_to_none=False)
    resting.optimizer.step()  # nothing to do, as in PyTorch
    with pytest.raises(ParameterError, match=r"\.grad on parameter '0.weight'"):
        p.grad = torch.zeros(16, 8)

    resting.status.gradients_pending = True
    ways: tuple[Callable[[], Any], ...] = (
        lambda: p.grad,
        lambda: setattr(p, "grad", None),
        lambda: delattr(p, "grad"),
        lambda: nn.utils.clip_grad_norm_([p], 1.0),
        lambda: nn.utils.clip_grad_value_([p], 1.0),
        lambda: resting.model.zero_grad(),
        lambda: resting.optimizer.zero_grad(),
        lambda: resting.optimizer.step(),
    )
    for way in ways:
        with pytest.raises(ParameterError, match=r"0\.weight.*clip_grad_norm_\(\).*engine\.zero_grad\(\)"):
            way()
    resting.status.gradients_pending = False
    assert p.grad is None


def test_requires_grad_of_what_is_trained_can_be_set(resting: Resting) -> None:
    p, others = resting.list[0], resting.list[1:]
    for way in (lambda: p.requires_grad_(False), lambda: setattr(p, "requires_grad", False)):
        way()
        way()
        assert not p.requires_grad and "requires_grad=False" in repr(p) and resting.status.off == {NAME}
        assert all(other.requires_grad for other in others)
        assert p.requires_grad_() is p and p.requires_grad and not resting.status.off
    resting.model.requires_grad_(False)
    assert resting.status.off == set(resting.parameters.names)
    resting.status.show(Showing.REAL)
    with pytest.raises(ParameterError, match=r"requires_grad = True on parameter '0\.weight'.*between engine calls"):
        p.requires_grad = True


def test_what_was_frozen_stays_so() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    resting = make_resting(model)
    model.bias.requires_grad_(False)
    with pytest.raises(ParameterError, match=r"requires_grad = True on parameter 'bias'.*initialize again"):
        model.requires_grad_(True)
    assert not resting.status.off and model.weight.requires_grad and not model.bias.requires_grad
    with pytest.raises(ParameterError, match=r"register_hook on parameter 'bias'.*not require gradients"):
        model.bias.register_hook(lambda gradient: None)


def test_hooks_are_kept_in_their_order(resting: Resting) -> None:
    p = resting.list[0]

    def first(gradient: torch.Tensor) -> None: ...

    def second(gradient: torch.Tensor) -> None: ...

    handle = p.register_hook(first)
    p.register_hook(hook=second)
    assert list(resting.status.hooks[NAME].values()) == [first, second]
    handle.remove()
    assert list(resting.status.hooks[NAME].values()) == [second]
    with pytest.raises(ParameterError, match=r"register_post_accumulate_grad_hook on parameter '0\.weight'.*use regis"):
        p.register_post_accumulate_grad_hook(lambda p: None)
