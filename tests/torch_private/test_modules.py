"""The insides of modules."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from zeroweave._torch.modules import (
    child_modules,
    is_compiled_function,
    parameter_entries,
    refresh_rnn_weights,
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
