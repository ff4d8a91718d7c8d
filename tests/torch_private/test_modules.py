"""The insides of modules."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import zeroweave._torch as private

pytestmark = pytest.mark.oldest


def test_compiled_functions_and_children_are_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert private.child_modules(model)["0"] is model[0]
    model[0] = nn.Tanh()
    assert isinstance(private.child_modules(model)["0"], nn.Tanh)
    assert private.is_compiled_function(torch.compile(model.forward))
    assert not private.is_compiled_function(model.forward) and not private.is_compiled_function(None)


def test_recurrent_modules_follow_their_entries() -> None:
    lstm = nn.LSTM(2, 3)
    x = torch.ones(1, 1, 2)
    private.watch_rnn_weights(lstm, watch=False)
    assert not weakref.getweakrefs(lstm.weight_ih_l0)
    entries = private.parameter_entries(lstm)
    for name, weight in entries.items():
        entries[name] = nn.Parameter(torch.zeros_like(weight))
    assert lstm(x)[0].any(), "the list of weights is its own"
    private.refresh_rnn_weights(lstm)
    assert not lstm(x)[0].any()
    private.watch_rnn_weights(lstm, watch=True)
    assert weakref.getweakrefs(lstm.weight_ih_l0)
