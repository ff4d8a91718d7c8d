"""The insides of modules and of optimizers."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_backward_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from zeroweave._torch.modules import (
    Hooks,
    child_modules,
    has_step_hooks,
    is_compiled_function,
    is_step_replaced,
    parameter_entries,
    refresh_rnn_weights,
    shapes_state_dict,
    watch_rnn_weights,
)

pytestmark = pytest.mark.oldest


def test_compiled_functions_and_children_are_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert child_modules(model)["0"] is model[0]
    model[0] = nn.Tanh()
    assert isinstance(child_modules(model)["0"], nn.Tanh)
    assert is_compiled_function(torch.compile(model.forward))
    assert not is_compiled_function(model.forward) and not is_compiled_function(None)


def test_hooks_that_calls_run_are_seen_as_they_come_and_go() -> None:
    module = nn.Linear(2, 2)
    model = nn.Sequential(module, nn.Sequential(nn.ReLU()))
    seen = Hooks(model)
    registers: tuple[Callable[..., RemovableHandle], ...] = (
        module.register_forward_pre_hook,
        module.register_forward_hook,
        module.register_full_backward_pre_hook,
        module.register_full_backward_hook,
        register_module_forward_pre_hook,
        register_module_forward_hook,
        register_module_full_backward_pre_hook,
        register_module_full_backward_hook,
    )
    numbers = []
    for register in registers:
        handle = register(lambda *_: None)
        (number,) = seen.now()
        numbers.append(number)
        handle.remove()
        assert not seen.now()
    assert len(set(numbers)) == len(registers), "numbers that were never given before"


def test_hooks_are_seen_in_what_has_been_exchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    seen = Hooks(model)
    model[0]._forward_hooks = OrderedDict()
    model[0].register_forward_hook(lambda *_: None)
    assert len(seen.now()) == 1
    model[1][0] = nn.ReLU()
    model[1][0].register_forward_hook(lambda *_: None)
    assert len(seen.now()) == 2
    model[1].append(nn.ReLU())
    assert len(seen.now()) == 2


def test_backward_hooks_of_the_old_kind_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = Hooks(model)
    model[0].register_full_backward_hook(lambda *_: None)
    assert not seen.partly()
    model[1].register_backward_hook(lambda *_: None)
    assert seen.partly()
    # A process has global hooks of one kind only, that of the first.
    monkeypatch.setattr("torch.nn.modules.module._global_is_full_backward_hook", None)
    model, handle = nn.Sequential(nn.Linear(2, 2)), register_module_backward_hook(lambda *_: None)
    assert Hooks(model).partly()
    handle.remove()
    assert not Hooks(model).partly()


def test_recurrent_modules_follow_their_entries() -> None:
    lstm = nn.LSTM(2, 3)
    x = torch.ones(1, 1, 2)
    watch_rnn_weights(lstm, watch=False)
    assert not weakref.getweakrefs(lstm.weight_ih_l0)
    entries = parameter_entries(lstm)
    for name, weight in entries.items():
        entries[name] = nn.Parameter(torch.zeros_like(weight))
    assert lstm(x)[0].any(), "the list of weights is its own"
    refresh_rnn_weights(lstm)
    assert not lstm(x)[0].any()
    watch_rnn_weights(lstm, watch=True)
    assert weakref.getweakrefs(lstm.weight_ih_l0)


class Own(nn.Linear):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None: ...


class OwnLoading(nn.Linear):
    def _load_from_state_dict(self, *args: object) -> None: ...


def hooked(kind: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, kind)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("make", "saving", "loading"),
    [
        (lambda: nn.BatchNorm1d(2), False, False),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False, False),
        (lambda: Own(2, 2), True, True),
        (lambda: OwnLoading(2, 2), False, True),
        (lambda: hooked("register_state_dict_pre_hook"), True, False),
        (lambda: hooked("register_state_dict_post_hook"), True, False),
        (lambda: hooked("register_load_state_dict_pre_hook"), False, True),
        (lambda: hooked("register_load_state_dict_post_hook"), False, True),
    ],
)
def test_modules_that_change_state_dicts_are_known(make: Callable[[], nn.Module], saving: bool, loading: bool) -> None:
    module = make()
    assert shapes_state_dict(module, (), loading=False) is saving
    assert shapes_state_dict(module, (), loading=True) is loading


def test_hooks_of_ones_own_do_not_count() -> None:
    module = nn.Linear(2, 2)
    handle = module.register_load_state_dict_pre_hook(lambda *_: None)
    assert not shapes_state_dict(module, {handle.id}, loading=True)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    assert shapes_state_dict(module, {handle.id}, loading=True)


def test_who_listens_to_an_optimizer_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not is_step_replaced(optimizer) and not has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    everywhere = register_optimizer_step_post_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    everywhere.remove()
    assert not has_step_hooks(optimizer)
    optimizer.step = lambda: None
    assert is_step_replaced(optimizer)
