"""Which optimizers can run on fragments: checked before anything is changed."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from zeroweave.errors import ParameterError, UnsupportedOptimizer, listed
from zeroweave.optim.lion import Lion
from zeroweave.optim.multi_optimizer import Given, is_declared_element_wise
from zeroweave.optim.states import uncuttable
from zeroweave.parameters.foreign import own_parameters

# Optimizers that compute each element by itself, and whose state, step counters included, belongs to single
# parameters: some of these can be stepped without the others. Exact types; a subclass may do other things.
ELEMENT_WISE = frozenset({Lion}).union(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)

_OF_PACKAGES = frozenset({f"schedulefree.{name}ScheduleFree" for name in ("AdamW", "RAdam", "SGD")})
"""Package and class of element-wise optimizers that are not imported here. They step all parameters together."""

_FACTORED = "computes with rows and columns of whole parameters, and keeps states of their sizes"
_NEVER = {
    "lbfgs": "calls a closure several times a step",
    "sparseadam": "needs sparse gradients",
    **dict.fromkeys(
        ("adafactor", "came", "galoreadamw", "shampoo", "distributedshampoo", "sm3", "soap", "adammini"), _FACTORED
    ),
}
"""Optimizers that cannot be used even with whole parameters, by the lower-case names of their classes and bases."""

_OF_WHOLES = {
    **dict.fromkeys(("muon", "adamuon", "kron", "psgd"), "computes with whole matrices"),
    **dict.fromkeys(("lamb", "fusedlamb", "lars", "larc", "novograd"), "computes norms of whole parameters"),
}
"""Those that look at more than one element at a time."""

_QUANTIZED = re.compile(r"([48]bit|fp8)$", re.IGNORECASE)


def check_optimizers(optimizers: Sequence[Given], model: nn.Module) -> None:
    """Passes if each can be used for `model`, see `check_optimizer`, and no parameter is in two of them."""
    for optimizer, whole in optimizers:
        check_optimizer(optimizer, model, whole)
    numbers: dict[int, int] = {}
    for number, (optimizer, _) in enumerate(optimizers):
        if (first := numbers.setdefault(id(optimizer), number)) != number:
            raise ParameterError(
                f"[ZW304] optimizers[{first}] and optimizers[{number}] are one {type(optimizer).__name__}"
            )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    homes: dict[int, str] = {}
    for number, (optimizer, _) in enumerate(optimizers):
        where = f"optimizers[{number}] ({type(optimizer).__name__})"
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if homes.setdefault(id(parameter), where) != where:
                raise ParameterError(
                    f"[ZW304] {names[id(parameter)]!r} is in two optimizers, {homes[id(parameter)]} and {where}: a "
                    "parameter is updated by one; nothing was changed"
                )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, whole: bool = False) -> None:
    """Passes if `optimizer` can run on fragments of `model`'s parameters; else one ParameterError.

    It names everything that is wrong: an optimizer whose class or whose step's signature says that it is not
    element-wise, a class that is not known and not declared to be element-wise, parameters that are not the model's or
    occur twice, and state that cannot be cut. UnsupportedOptimizer, which is a ParameterError, for an object that is no
    torch.optim.Optimizer. `whole`: it gets whole parameters, and may compute what it likes. Changes nothing. To be
    called before the parameters are put to rest.
    """
    reasons = [*_class_reasons(optimizer, whole)]
    if isinstance(optimizer, torch.optim.Optimizer):
        names = {id(parameter): name for name, parameter in own_parameters(model).items()}
        reasons += _group_reasons(optimizer, names)
        if lasting := uncuttable(optimizer.state, names):
            reasons.append(
                f"it holds state that cannot be cut like its parameters ({', '.join(lasting)}); build a new optimizer "
                "for zeroweave.initialize, or use AdamW, Adam or SGD"
            )
        if not reasons and not whole and not _is_element_wise(optimizer):
            reasons.append(
                "its class is not known to be element-wise, and a rank holds parts of parameters; pass "
                "zeroweave.element_wise(optimizer) if a step on a part of a parameter equals that part of a step on "
                "the whole, zeroweave.WholeMatrices(optimizer) if it updates each parameter by itself from the whole; "
                "or use AdamW, Adam or SGD"
            )
    if reasons:
        lines = "\n".join(f"  {reason}" for reason in reasons)
        kind = ParameterError if isinstance(optimizer, torch.optim.Optimizer) else UnsupportedOptimizer
        raise kind(f"[ZW301] optimizer {type(optimizer).__name__} cannot be used; nothing was changed:\n{lines}")


def in_no_group(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> str:
    """What to tell of parameters that train and that the optimizer does not have; "" where there are none."""
    has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in has]
    if not left:
        return ""
    return (
        f"what requires gradients and is in no group of the optimizer stays as it is: {listed(left)}. "
        "Its gradients are reduced and count in the norm all the same: add it to the optimizer, or freeze it with "
        "requires_grad_(False)"
    )


def _is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    of_package = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    return kind in ELEMENT_WISE or of_package in _OF_PACKAGES or is_declared_element_wise(optimizer)


def _class_reasons(optimizer: object, whole: bool) -> Iterator[str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield (
            "it is not a torch.optim.Optimizer: a wrapper hides its parameters, and nobody could hand it their "
            "gradients; pass the optimizer inside it, a list of optimizers, or a callable from the parameters to either"
        )
        return
    if _QUANTIZED.search(type(optimizer).__name__):
        yield (
            "it is not element-wise: it keeps its state in blocks of few bits, one scale for the elements of each; "
            "use AdamW or Adam, with precision.optimizer 'compact', or with offload.optimizer for states in host memory"
        )
        return
    for name in (base.__name__.lower() for base in type(optimizer).__mro__):
        if name in _NEVER:
            yield f"it is not element-wise: it {_NEVER[name]}, and a rank holds fragments; use AdamW, Adam or SGD"
            return
        if name in _OF_WHOLES and not whole:
            yield (
                f"it is not element-wise: it {_OF_WHOLES[name]}, of which a rank holds fragments; use AdamW, Adam or "
                "SGD, or zeroweave.WholeMatrices(optimizer) if it updates each parameter by itself from a dense "
                "gradient, and keeps states of its shape"
            )
            return
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]  # without self
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        yield f"its step() needs {', '.join(needed)}, which engine.step() cannot give; use AdamW, Adam or SGD"


def _group_reasons(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    members = [
        (f"param_groups[{g}]['params'][{i}] {tuple(parameter.shape)}", id(parameter))
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
    other = [number for number, key in members if key not in names]
    if other:
        yield (
            f"it is an optimizer over other parameters than the model's ({', '.join(other)}); "
            "build it on model.parameters() of the model that is initialized, without frozen ones of other libraries"
        )
    counts = Counter(key for _, key in members)
    twice = [names.get(key, "a parameter of another model") for key, count in counts.items() if count > 1]
    if twice:
        yield f"parameters occur twice in its groups: {', '.join(twice)}"
