"""Frozen parameters of other libraries' classes, such as quantized weights: they stay in the modules as they are."""

from __future__ import annotations

import torch
from torch import nn

from zeroweave.parameters.stub import AtRest


def is_foreign(parameter: nn.Parameter) -> bool:
    """True if a parameter is frozen and its class is none of PyTorch's, so that it is not sharded."""
    kind = type(parameter)
    return not (kind in (nn.Parameter, AtRest) or parameter.requires_grad or kind.__module__.startswith("torch."))


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that are sharded, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if not is_foreign(parameter)}


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical name -> all names of the parameter, that one first."""
    canonical = {id(parameter): name for name, parameter in own_parameters(model).items()}
    names: dict[str, list[str]] = {name: [name] for name in canonical.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_foreign(parameter) and name not in names[canonical[id(parameter)]]:
            names[canonical[id(parameter)]].append(name)
    return {name: tuple(known) for name, known in names.items()}


def foreign_parameters(model: nn.Module) -> dict[str, str]:
    """The names of those that stay as they are -> their shapes and classes."""
    named = model.named_parameters()
    return {name: f"{list(p.shape)} of class {type(p).__name__}" for name, p in named if is_foreign(p)}


def move(model: nn.Module, device: torch.device) -> None:
    """Moves them to a device, as buffers are: by their own `to`."""
    moved: dict[int, nn.Parameter] = {}
    for entries in (module._parameters for module in model.modules()):
        for name, old in entries.items():
            if old is not None and is_foreign(old) and old.device != device:
                if id(old) not in moved:
                    new: torch.Tensor = old.to(device)
                    moved[id(old)] = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=False)
                entries[name] = moved[id(old)]
