"""The insides of `nn.Module`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def parameter_entries(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary that `module.weight` reads. Why: exchanging entries is how parameters come and go."""
    return module._parameters


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The live dictionary of a module's children. Why: `_parameters` is not all that can be replaced."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The forward pre-hooks of `module`. Why: the old weight_norm is one, and keeps a graph alive."""
    return tuple(module._forward_pre_hooks.values())


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Why: the engine compiles regions itself."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_function(function: object) -> bool:
    """Whether `torch.compile` made it. Why: a forward that is compiled already is no code of a region."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Makes an RNN compute with its present `_parameters`. Why: it keeps a list of its weights of its own."""
    entries = module._parameters
    module._flat_weights[:] = [
        entries.get(name, old) for name, old in zip(module._flat_weights_names, module._flat_weights, strict=True)
    ]


def watch_rnn_weights(module: nn.RNNBase, watch: bool) -> None:
    """Lets an RNN hold weak references to its weights, or none.

    Why: a weakly referenced tensor cannot be swapped; without them the RNN trusts its list, which
    `refresh_rnn_weights` keeps right.
    """
    module._flat_weight_refs = [
        weakref.ref(weight) if watch and weight is not None else None for weight in module._flat_weights
    ]
