"""The `optimizer` section of a DeepSpeed configuration, with torch's classes and Lion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any, Final

import torch
from torch import nn

from zeroweave.config.deepspeed import left
from zeroweave.config.messages import nearest
from zeroweave.optim.lion import Lion

_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_ABSENT: Final = {
    **dict.fromkeys(("lamb", "onebitlamb"), "it needs norms of whole parameters, which no rank has: AdamW is nearest"),
    **dict.fromkeys(("onebitadam", "zerooneadam"), "gradients are not sent as single bits: AdamW is nearest"),
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "torch has none: pass zeroweave.initialize a callable that makes mup's"
    ),
    "muon": (
        "DeepSpeed's trains some parameters with Adam: pass zeroweave.initialize a list, torch.optim.Muon of the "
        "matrices and torch.optim.AdamW of the rest"
    ),
}
"""DeepSpeed's own optimizers, in lower case as DeepSpeed compares them."""

_SWITCHES: Final = ("adam_w_mode", "torch_adam")
_NEUTRAL: Final = {"bias_correction": True, "fp32_optimizer_states": True, "set_grad_none": None}
"""Parameters of DeepSpeed's Adam that torch's does not have, and the value that is torch's way; None: any."""


def optimizer_of(section: Any, problems: list[str]) -> _Make | None:
    """What makes the optimizer of a section, from parameters. `problems` gets what is wrong with the section.

    None without a section, or where anything is wrong.
    """
    if section is None:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        problems.append(f"optimizer is {section!r}: a section with a type, such as AdamW, and its params")
        return None
    name, params = section["type"], section.get("params") or {}
    if not isinstance(params, Mapping):
        problems.append(f"optimizer.params is {params!r}: a section of keys")
        return None
    wrong = [*_unknown(section), *(left(f"optimizer.params.{key}") for key, value in params.items() if value == "auto")]
    kind, arguments = _class_of(name, params)
    if (why := _ABSENT.get(name.lower())) is not None:
        wrong.append(f"optimizer.type is {name!r}: {why}")
    elif kind is None:
        wrong.append(f"optimizer.type is {name!r}: none of torch.optim, as AdamW, Adam and SGD are")
    else:
        wrong += _parameters(kind, params)
    problems += wrong
    return None if wrong or kind is None else _made(kind, arguments, problems)


def _made(
    kind: Callable[..., torch.optim.Optimizer], arguments: Mapping[str, Any], problems: list[str]
) -> _Make | None:
    """Tried out on a parameter."""
    make = partial(
        kind, **{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    )
    try:
        make([nn.Parameter(torch.zeros(1))])
    except Exception as error:  # whatever a class of torch raises for an argument that it does not take
        problems.append(f"optimizer.params: {error}")
        return None
    return make


def _class_of(name: str, params: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer] | None, dict[str, Any]]:
    """Lion, or torch's class of exactly this name, and its arguments; DeepSpeed knows its own in any case."""
    if name.lower() in ("adam", "adamw"):
        return _adam(name.lower(), dict(params))
    if name.lower() == "lion":
        return Lion, {"lr": 1e-3, **params}  # DeepSpeed's default
    kind = getattr(torch.optim, "Adagrad" if name.lower() == "adagrad" else name, None)
    fits = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    return (kind if fits else None), dict(params)


def _unknown(section: Mapping[Any, Any]) -> Iterator[str]:
    for key in section:
        if key not in ("type", "params", "legacy_fusion"):
            near = nearest(f"optimizer.params.{key}", ("optimizer.params.adam_w_mode", "optimizer.params.torch_adam"))
            yield f"optimizer.{key}: unknown; " + (f"did you mean {near!r}?" if near else "remove it")


def _adam(name: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """DeepSpeed's Adam decays weights as AdamW does unless `adam_w_mode` is false; its own decays by 0 by default."""
    decoupled = params.get("adam_w_mode", True) or name == "adamw"
    if not params.get("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
    kept = {key: value for key, value in params.items() if key not in (*_SWITCHES, *_NEUTRAL)}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), kept


def _parameters(kind: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> Iterator[str]:
    adam, where = kind in (torch.optim.Adam, torch.optim.AdamW), "zeroweave." if kind is Lion else "torch.optim."
    known = {name: each.default for name, each in inspect.signature(kind).parameters.items() if name != "params"}
    for key, value in params.items():
        if adam and key in _SWITCHES:
            if value not in (True, False, "auto"):
                yield f"optimizer.params.{key} is {value!r}: true or false"
        elif key == "max_grad_norm":
            yield f"optimizer.params.max_grad_norm is {value!r}: write gradient_clipping, beside optimizer"
        elif adam and key in _NEUTRAL:
            if _NEUTRAL[key] not in (None, value):
                yield f"optimizer.params.{key} is {value!r}: torch's {kind.__name__} does as with {_NEUTRAL[key]!r}"
        elif key not in known:
            near = nearest(key, (*known, *(_SWITCHES if adam else ())))
            hint = f"did you mean {near!r}?" if near else f"the parameters are {', '.join(known)}"
            yield f"optimizer.params.{key}: unknown to {where}{kind.__name__}; {hint}"
        elif (allowed := _unlike(value, known[key])) and value != "auto":
            yield f"optimizer.params.{key} is {value!r}: {allowed}"


def _unlike(value: Any, default: Any) -> str:
    """What a parameter has to be, as its default says, where `value` is something else. None says nothing."""
    match default:
        case bool():
            return "" if isinstance(value, bool) else "true or false"
        case int() | float():
            return "" if _is_number(value) else "a number"
        case tuple():
            alike = isinstance(value, list | tuple) and len(value) == len(default)
            fits = alike and all(
                _is_number(each) or each is own is None for each, own in zip(value, default, strict=True)
            )
            return "" if fits else f"a list of {len(default)} numbers"
    return ""


def _is_number(value: Any) -> bool:
    """NumPy's count as well, and what torch takes as a learning rate on the device."""
    return isinstance(value, Real | torch.Tensor) and not isinstance(value, bool)
