"""Which optimizers can run on fragments: checked before anything is changed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeroweave.errors import ParameterError, UnsupportedOptimizer

# Optimizers that look at more than one element at a time, or that need other gradients than dense ones, by
# the lower-case names of their classes and base classes.
_NOT_ELEMENT_WISE = {
    "lbfgs": "calls a closure several times a step",
    "sparseadam": "needs sparse gradients",
    **dict.fromkeys(
        ("adafactor", "came", "galoreadamw", "shampoo", "distributedshampoo", "sm3", "soap", "adammini"),
        "computes with rows and columns of whole parameters",
    ),
    **dict.fromkeys(("muon", "adamuon", "kron", "psgd"), "computes with whole matrices"),
    **dict.fromkeys(("lamb", "fusedlamb", "lars", "larc", "novograd"), "computes norms of whole parameters"),
}


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Passes if `optimizer` can run on fragments of `model`'s parameters; else one ParameterError.

    It names everything that is wrong: an optimizer that is not element-wise (where that can be known from
    its class or the signature of its `step`), parameters that are not the model's or occur twice, and
    existing state. UnsupportedOptimizer, which is one, for an object that is no torch.optim.Optimizer.
    Changes nothing. To be called before the parameters are put to rest.
    """
    reasons = [*_class_reasons(optimizer)]
    if isinstance(optimizer, torch.optim.Optimizer):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        reasons += _group_reasons(optimizer, names)
        stateful = [
            names.get(id(parameter), "a parameter of another model")
            for parameter, state in optimizer.state.items()
            if state and not _is_initial(optimizer, state)
        ]
        if stateful:
            reasons.append(
                f"it has state already ({_listed(stateful)}); build a new optimizer for zeroweave.initialize"
            )
    if reasons:
        lines = "\n".join(f"  {reason}" for reason in reasons)
        kind = ParameterError if isinstance(optimizer, torch.optim.Optimizer) else UnsupportedOptimizer
        raise kind(f"optimizer {type(optimizer).__name__} cannot be used; nothing was changed:\n{lines}")


def initial_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None
) -> Callable[[torch.Tensor], dict[str, Any]] | None:
    """How to make the state that `optimizer` gives a parameter when it is built, None if it gives none.

    Of torch's optimizers only Adagrad does; an unused Adagrad is as good as one built on the fragments.
    `state` is what the optimizer holds for the parameter, None if nothing.
    """
    if state is None or not isinstance(optimizer, torch.optim.Adagrad):
        return None
    value = optimizer.defaults["initial_accumulator_value"]

    def make(parameter: torch.Tensor) -> dict[str, Any]:
        device = parameter.device if optimizer.defaults["fused"] else None
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "sum": torch.full_like(parameter, value, requires_grad=False, memory_format=torch.preserve_format),
        }

    return make


def _is_initial(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.Adagrad) and not state["step"].item()


def _class_reasons(optimizer: object) -> Iterator[str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield (
            "it is not a torch.optim.Optimizer: a wrapper hides its parameters, and nobody could hand it their "
            "gradients; pass the optimizer inside it, or a callable from the parameters to one"
        )
        return
    for base in type(optimizer).__mro__:
        if (why := _NOT_ELEMENT_WISE.get(base.__name__.lower())) is not None:
            yield f"it is not element-wise: it {why}, of which a rank holds fragments; use AdamW, Adam or SGD"
            return
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]  # without self
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        yield f"its step() needs {_listed(needed)}, which engine.step() cannot give; use AdamW, Adam or SGD"


def _group_reasons(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    members = [
        (f"param_groups[{g}]['params'][{i}] {tuple(parameter.shape)}", id(parameter))
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
    other = [place for place, key in members if key not in names]
    if other:
        yield (
            f"it is an optimizer over other parameters than the model's ({_listed(other)}); "
            "build it on model.parameters() of the model that is initialized"
        )
    counts = Counter(key for _, key in members)
    twice = [names.get(key, "a parameter of another model") for key, count in counts.items() if count > 1]
    if twice:
        yield f"parameters occur twice in its groups: {_listed(twice)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names)
