"""Which optimizers can run on fragments: checked before anything is changed."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from zeroweave.errors import ParameterError, UnsupportedOptimizer
from zeroweave.optim.lion import Lion
from zeroweave.optim.probe import kept_of_wholes, probe
from zeroweave.optim.several import WHOLE_MATRIX, Given
from zeroweave.optim.states import uncuttable
from zeroweave.parameters.foreign import own_parameters

# Optimizers that compute each element by itself, and whose state, step counters included, belongs to single
# parameters: some of these can be stepped without the others. Exact types; a subclass may do things of its own.
ELEMENT_WISE = frozenset({Lion}).union(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)

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

_NEVER = ("lbfgs", "sparseadam")
"""Those that whole parameters do not help."""

_SHOWN = 8
"""Names that a warning tells."""

_QUANTIZED = re.compile(r"([48]bit|fp8)$", re.IGNORECASE)


def check_optimizers(optimizers: Sequence[Given], model: nn.Module) -> None:
    """Passes if each can be used for `model`, see `check_optimizer`, and no parameter is in two of them."""
    for optimizer, whole in optimizers:
        check_optimizer(optimizer, model, whole)
    places: dict[int, int] = {}
    for number, (optimizer, _) in enumerate(optimizers):
        if (first := places.setdefault(id(optimizer), number)) != number:
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
    element-wise, parameters that are not the model's or occur twice, and state that cannot be cut. Where nothing is,
    and the class is none of torch's, a copy of the optimizer is tried out; see `probe`. UnsupportedOptimizer, which is
    a ParameterError, for an object that is no torch.optim.Optimizer. `whole`: it gets whole parameters, and may compute
    what it likes; what it keeps has to be of their shapes all the same. Changes nothing. To be called before the
    parameters are put to rest.
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
        if not reasons and whole and type(optimizer) not in WHOLE_MATRIX and (kept := kept_of_wholes(optimizer)):
            reasons.append(
                f"it keeps what cannot be cut among the ranks as a parameter is ({', '.join(kept)}): an optimizer of "
                "whole matrices keeps tensors of the parameter's shape, or one value"
            )
        if not reasons and not whole and type(optimizer) not in ELEMENT_WISE:
            reasons += probe(optimizer)
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
    shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
    return (
        f"what requires gradients and is in no group of the optimizer stays as it is: {shown}. "
        "Its gradients are reduced and count in the norm all the same: add it to the optimizer, or freeze it with "
        "requires_grad_(False)"
    )


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
    for base in type(optimizer).__mro__:
        if (why := _NOT_ELEMENT_WISE.get(base.__name__.lower())) is not None:
            if whole and base.__name__.lower() not in _NEVER:
                break
            yield (
                f"it is not element-wise: it {why}, of which a rank holds fragments; use AdamW, Adam or SGD, or "
                "zeroweave.WholeMatrices(optimizer) if it updates each parameter by itself from a dense gradient, and "
                "keeps states of its shape"
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
    other = [place for place, key in members if key not in names]
    if other:
        yield (
            f"it is an optimizer over other parameters than the model's ({', '.join(other)}); "
            "build it on model.parameters() of the model that is initialized, without frozen ones of other libraries"
        )
    counts = Counter(key for _, key in members)
    twice = [names.get(key, "a parameter of another model") for key, count in counts.items() if count > 1]
    if twice:
        yield f"parameters occur twice in its groups: {', '.join(twice)}"
