"""The insides of modules and of optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping
from operator import itemgetter, methodcaller
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.optim import optimizer as all_optimizers

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SAVING: Final = "_state_dict_pre_hooks _state_dict_hooks state_dict _save_to_state_dict get_extra_state".split()
_LOADING: Final = (
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks load_state_dict _load_from_state_dict set_extra_state"
).split()
_THEIRS: Final = itemgetter(*_HOOKS)
_CHILDREN: Final = itemgetter("_modules")
_PARAMETERS: Final = itemgetter("_parameters")
_VALUES: Final = methodcaller("values")


def parameter_entries(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary that `module.weight` reads. Why: exchanging entries is how parameters come and go."""
    return module._parameters


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The live dictionary of a module's children. Why: `_parameters` is not all that can be replaced."""
    return module._modules


class Inside:
    """Which modules are inside a model, and where parameters are in each, when this is made.

    Why: nothing public tells that they come and go. A program may exchange a module's dictionaries, so that they are
    looked at in place.
    """

    def __init__(self, model: nn.Module) -> None:
        # Some of TorchScript's modules have no such dictionaries.
        self._insides = [own for own in map(vars, model.modules()) if own.keys() >= {"_modules", "_parameters"}]
        entries = [own["_parameters"] for own in self._insides]
        self._spare = [(each, name) for each in entries for name, p in each.items() if p is None]
        """where no parameter is, such as a bias that is left out"""
        self._children, self._sizes = self._children_now(), self._sizes_now()

    @property
    def holds(self) -> bool:
        """True if nothing else is there. Asked in each forward, of thousands, so with few steps of Python."""
        return (
            self.modules_hold
            and self._sizes_now() == self._sizes
            and all(entries.get(name) is None for entries, name in self._spare)
        )

    @property
    def modules_hold(self) -> bool:
        """True if the modules are the same, in the same order."""
        return self._children_now() == self._children

    def _children_now(self) -> list[tuple[nn.Module | None, ...]]:
        """Of each module that has some."""
        return list(map(tuple, map(_VALUES, filter(None, map(_CHILDREN, self._insides)))))

    def _sizes_now(self) -> list[int]:
        return list(map(len, map(_PARAMETERS, self._insides)))


def forward_pre_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """The forward pre-hooks of `module`. Why: the old weight_norm is one, and keeps a graph alive."""
    return tuple(module._forward_pre_hooks.values())


class Hooks:
    """The hooks that calls of a module, of those inside of it, and their backwards run, those for all modules first.

    Why: nothing public tells that they come and go. A program may exchange a module's dictionaries, and modules without
    parameters, so that both are looked at in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._insides: list[dict[str, Any]] = []
        self._inside = Inside(module)
        self._walk()

    def now(self) -> tuple[int, ...]:
        """The unique numbers of the hooks, in their order. Asked in each step, of all modules."""
        if not self._inside.modules_hold:
            self._inside = Inside(self._module)
            self._walk()
        numbers = [
            *all_modules._global_forward_pre_hooks,
            *all_modules._global_forward_hooks,
            *all_modules._global_backward_pre_hooks,
            *all_modules._global_backward_hooks,
        ]
        for hooks in filter(any, map(_THEIRS, self._insides)):
            for kind in hooks:
                numbers += kind
        return tuple(numbers)

    def partly(self) -> bool:
        """True if there are backward hooks of the old kind. They see only the backward of a module's last operator."""
        old = all_modules._global_backward_hooks and not all_modules._global_is_full_backward_hook
        return bool(old) or any(
            inside["_backward_hooks"] and inside["_is_full_backward_hook"] is False for inside in self._insides
        )

    def _walk(self) -> None:
        self._insides = [vars(module) for module in self._module.modules()]


def hooks_as_called(module: nn.Module) -> tuple[tuple[str, Callable[..., Any], bool, bool], ...]:
    """The hooks of one module: their kind, what is called, whether with keyword arguments, and whether always.

    Why: nothing public lists them.
    """
    none: Mapping[int, bool] = {}
    kinds = (
        ("before forward", module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, none),
        ("forward", module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ("before backward", module._backward_pre_hooks, none, none),
        ("backward", module._backward_hooks, none, none),
    )
    return tuple(
        (kind, hook, number in with_kwargs, number in always)
        for kind, hooks, with_kwargs, always in kinds
        for number, hook in hooks.items()
    )


def shapes_state_dict(module: nn.Module, own: Container[int], loading: bool) -> bool:
    """True if a state dict has other things of a module than its parameters and buffers under their names.

    That is by hooks, extra state, or methods that are not torch's own. `own`: the numbers of hooks that do not count.
    `loading`: where a state dict is loaded, else where one is made. Why: nothing public tells of hooks.
    """
    first, second, *methods = _LOADING if loading else _SAVING
    hooks = [*getattr(module, first, {}).items(), *getattr(module, second, {}).items()]
    ways = [hook for number, hook in hooks if number not in own] + [getattr(type(module), name) for name in methods]
    return not all(each.__module__.startswith("torch.nn.") for each in ways)


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` was called. Why: the engine compiles regions itself."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_function(function: object) -> bool:
    """True if `torch.compile` made it. Why: a forward that is compiled already is no code of a region."""
    return getattr(function, "_torchdynamo_orig_callable", None) is not None


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Makes an RNN compute with its present `_parameters`. Why: it keeps its own list of its weights."""
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


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step` calls hooks, its own or global ones. Why: those expect one call a step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or all_optimizers._global_optimizer_pre_hooks
        or all_optimizers._global_optimizer_post_hooks
    )


def is_step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step` was set on the object. Learning rate schedulers do not count: theirs only notes the
    call. Why: a wrapper of a user expects one call a step."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
