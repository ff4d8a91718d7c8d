"""Between engine calls every way of touching a parameter is refused by name, at every stage and by every route."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.parameters.test_stub import TOUCHES
from zeroweave.errors import ParameterError

pytestmark = pytest.mark.oldest

NAME = "blocks.1.weight"
SHAPE = (8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@dataclass
class Sharded:
    """An engine over `Model`, with the parameter called NAME as each route sees it."""

    engine: Any
    earlier: list[nn.Parameter]

    def by_route(self, route: str) -> nn.Parameter:
        if route == "module":
            return self.engine.module.get_parameter(NAME)
        if route == "earlier":
            return self.earlier[2]
        return self.engine.optimizer.param_groups[0]["params"][2]

    def backward(self) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        self.engine.backward(self.engine(x).pow(2).mean())


ROUTES = ("module", "earlier", "groups")
MOMENTS = ("before", "waiting", "after")


@pytest.fixture(params=[1, 2, 3], ids=lambda stage: f"stage{stage}")
def sharded(request: pytest.FixtureRequest) -> Iterator[Sharded]:
    torch.manual_seed(0)
    model = Model()
    earlier = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"stage": request.param, "compile": {"enabled": False}}
    with zw.initialize(model, optimizer, settings) as engine:
        yield Sharded(engine, earlier)


def reach(sharded: Sharded, moment: str) -> None:
    """Before any forward, between backward and step, or after a step."""
    if moment != "before":
        sharded.backward()
    if moment == "after":
        sharded.engine.step()


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_touch_is_refused_by_name(sharded: Sharded, touch: str) -> None:
    for moment in MOMENTS:
        if moment != "before":
            sharded.backward()
        if moment == "after":
            sharded.engine.step()
        for route in ROUTES:
            parameter = sharded.by_route(route)
            with pytest.raises(ParameterError, match=re.escape(NAME)):
                TOUCHES[touch](parameter)
    sharded.backward()  # nothing was broken by trying
    sharded.engine.step()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("route", ROUTES)
def test_what_needs_no_values_is_answered(sharded: Sharded, moment: str, route: str) -> None:
    reach(sharded, moment)
    p = sharded.by_route(route)
    assert isinstance(p, nn.Parameter) and isinstance(p, Tensor) and p in set(sharded.earlier)
    assert tuple(p.shape) == SHAPE and p.dtype == torch.float32 and p.device.type == "cpu" and p.requires_grad
    assert p.numel() == 64 and p.dim() == 2 and p.is_leaf and p.element_size() == 4 and p.stride() == (8, 1)
    assert len(p) == 8 and p.is_contiguous() and p.is_floating_point()
    for text in (repr(p), str(p), f"{p}", f"{[p]}"):
        assert NAME in text and "(8, 8)" in text and not re.search(r"-?\d\.\d{3}", text), text
    assert sum(q.numel() for q in sharded.engine.module.parameters()) == 3 * 72
    assert [n for n, _ in sharded.engine.module.named_parameters()][2] == NAME
    assert "Linear" in repr(sharded.engine.module)


def test_gradients_that_wait_are_not_none(sharded: Sharded) -> None:
    parameters, optimizer = sharded.earlier, sharded.engine.optimizer
    assert all(p.grad is None for p in parameters)
    sharded.backward()
    for route in ROUTES:
        with pytest.raises(ParameterError, match=re.escape(NAME)):
            _ = sharded.by_route(route).grad
    for attempt in (
        lambda: nn.utils.clip_grad_norm_(sharded.engine.module.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 1.0),
        optimizer.step,
        optimizer.zero_grad,
        sharded.engine.module.zero_grad,
    ):
        with pytest.raises(ParameterError, match="engine"):
            attempt()
    sharded.engine.step()
    assert all(p.grad is None for p in parameters)


def test_module_wide_changes_are_refused(sharded: Sharded) -> None:
    module = sharded.engine.module
    before = sharded.engine.state_dict()
    for moment in ("waiting", "after"):
        reach(sharded, "waiting")
        if moment == "after":
            sharded.engine.step()
            before = sharded.engine.state_dict()
        for attempt in (
            lambda: module.to(torch.float64),
            module.half,
            lambda: copy.deepcopy(module),
            lambda: pickle.dumps(module),
            lambda: torch.save(module, io.BytesIO()),
            lambda: module.blocks[1].to(torch.bfloat16),
        ):
            with pytest.raises(ParameterError, match=r"blocks\.\d\.(weight|bias)"):
                attempt()
        after = sharded.engine.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_module_state_dict_is_served_or_refused(sharded: Sharded) -> None:
    module, engine = sharded.engine.module, sharded.engine
    reach(sharded, "after")
    right = engine.state_dict()
    try:
        served = module.state_dict()
        file = io.BytesIO()
        torch.save(served, file)
    except ParameterError:
        pass
    else:
        file.seek(0)
        loaded = torch.load(file)
        assert loaded.keys() == right.keys()
        assert all(torch.equal(loaded[name], right[name]) for name in right), "not the values after this step"
        for value in served.values():
            value.zero_()
        assert all(torch.equal(engine.state_dict()[name], right[name]) for name in right), "not independent copies"
    wanted = {name: torch.full_like(value, 0.25) for name, value in right.items()}
    try:
        module.load_state_dict(wanted)
    except ParameterError:
        wanted = right
    now = engine.state_dict()
    assert all(torch.equal(now[name], wanted[name]) for name in wanted), "load_state_dict was half done or ignored"


def test_optimizer_state_dict_is_served_or_refused(sharded: Sharded) -> None:
    reach(sharded, "after")
    try:
        saved = sharded.engine.optimizer.state_dict()
    except (ParameterError, zw.ZeroweaveError):
        return
    moments = {key: value["exp_avg"].numel() for key, value in saved["state"].items()}
    assert moments == dict(enumerate(p.numel() for p in sharded.earlier)), "served, but not whole"


def test_writes_in_full_parameters_are_kept(sharded: Sharded) -> None:
    reach(sharded, "after")
    with sharded.engine.full_parameters() as full, torch.no_grad():
        assert full[NAME].norm() > 0 and sharded.engine.module.get_parameter(NAME) is full[NAME]
        full[NAME].fill_(0.125)
        sharded.engine.module.get_parameter("blocks.0.bias").clamp_(0, 0)
    state = sharded.engine.state_dict()
    assert (state[NAME] == 0.125).all() and (state["blocks.0.bias"] == 0).all()
    with pytest.raises(ParameterError, match=re.escape(NAME)):
        sharded.by_route("module").norm()
    sharded.backward()
    sharded.engine.step()
    assert not torch.equal(sharded.engine.state_dict()[NAME], state[NAME])


def test_parameters_that_get_other_memory_in_full_parameters_are_kept(sharded: Sharded) -> None:
    """As torch's own `vector_to_parameters` gives them."""
    reach(sharded, "after")
    with sharded.engine.full_parameters() as full, torch.no_grad():
        values = nn.utils.parameters_to_vector(full.values())
        nn.utils.vector_to_parameters(values * 0.5, full.values())
        full[NAME].data = torch.full_like(full[NAME], 0.125)
        expected = {name: value.clone() for name, value in full.items()}
    state = sharded.engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items()) and (state[NAME] == 0.125).all()
    before = sharded.engine.state_dict()
    with (
        pytest.raises(ParameterError, match=re.escape(f"{NAME!r} is (2, 3) of torch.float32 on cpu now")),
        sharded.engine.full_parameters() as full,
    ):
        full["blocks.0.bias"].data = torch.ones_like(full["blocks.0.bias"])
        full[NAME].data = torch.ones(2, 3)
    after = sharded.engine.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "nothing is kept then"
    sharded.backward()
    sharded.engine.step()


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_in_full_parameters_is_told_to_end_there(sharded: Sharded, method: str) -> None:
    called: list[Tensor] = []
    with (
        pytest.warns(UserWarning, match=re.escape(f"hooks on {NAME} end here")),
        sharded.engine.full_parameters() as full,
    ):
        getattr(full[NAME], method)(called.append)
    sharded.backward()
    assert not called
    sharded.engine.step()
    with warnings.catch_warnings(), sharded.engine.full_parameters() as full:  # one for a term that is computed here
        warnings.simplefilter("error")
        handle = getattr(full[NAME], method)(called.append)
        sharded.engine.backward(full[NAME].square().sum())
        handle.remove()
    assert len(called) == 1


def test_values_are_read_between_a_forward_and_its_backward_only(sharded: Sharded) -> None:
    module = sharded.engine.module
    for parameters in (list(module.parameters()), sharded.earlier):
        loss = sharded.engine(torch.ones(2, 8)).mean()
        penalty = torch.stack([p.pow(2).sum() for p in parameters]).sum()
        sharded.engine.backward(loss + penalty)
        with pytest.raises(ParameterError, match=r"blocks\.0\.weight.*zeroweave\.mark_forward"):
            parameters[0].sum()
        sharded.engine.step()
        with pytest.raises(ParameterError, match=r"blocks\.0\.weight"):
            parameters[0].sum()
    with sharded.engine.full_parameters():
        expected = torch.stack([p.detach().pow(2).sum() for p in module.parameters()]).sum()
    sharded.engine(torch.ones(2, 8))
    with torch.no_grad():
        assert torch.equal(torch.stack([p.pow(2).sum() for p in module.parameters()]).sum(), expected)
    sharded.engine.zero_grad()
    with pytest.raises(ParameterError, match=r"blocks\.0\.weight"):
        sharded.earlier[0].sum()


def test_what_leaves_no_trace_is_refused_between_a_forward_and_its_backward(sharded: Sharded) -> None:
    loss = sharded.engine(torch.ones(2, 8)).mean()
    weight = sharded.earlier[0]
    for touch in (lambda: weight.data, lambda: copy.deepcopy(weight), lambda: pickle.dumps(weight)):
        with pytest.raises(ParameterError, match=r"blocks\.0\.weight"):
            touch()
    sharded.engine.backward(loss)
    sharded.engine.step()
