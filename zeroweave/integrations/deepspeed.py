"""A whole DeepSpeed configuration: zeroweave's config, and the optimizer and the scheduler that it describes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_type_hints

import torch
from pydantic import ConfigDict, ValidationError, create_model
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zeroweave.config import Config
from zeroweave.config.deepspeed import fill, left, refuse
from zeroweave.config.files import opened
from zeroweave.config.messages import findings
from zeroweave.errors import ConfigError
from zeroweave.integrations.deepspeed_schedules import SCHEDULES, follow
from zeroweave.optim.lion import Lion

_MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

_BUILT: Final = ("optimizer", "scheduler")
_OWN: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
}
"""The optimizers that DeepSpeed has its own classes for. It compares their names without case."""
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
    "onecycle": "betas are not cycled with the learning rate: torch's OneCycleLR, with its own params, is nearest",
    "reducelronplateau": "it needs a metric: step it yourself after engine.step()",
}
"""Types of optimizers and schedulers that are refused."""
_NEUTRAL: Final = {"bias_correction": True, "fp32_optimizer_states": True}
"""Parameters of DeepSpeed's Adam that torch's lacks, and the value with which both do the same."""


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration gives `zeroweave.initialize`. None: the file has no such section."""

    config: Config
    optimizer: _MakeOptimizer | None
    lr_scheduler: _MakeScheduler | None


def load_deepspeed(
    source: Mapping[str, Any] | str | os.PathLike[str], auto: Mapping[str, Any] | None = None
) -> FromDeepSpeed:
    """The config, the optimizer and the learning-rate scheduler that a DeepSpeed configuration describes.

    `source`, `auto`, warnings and errors: as for `Config.from_deepspeed`. The `optimizer` and `scheduler` sections
    become callables that make objects of torch.optim, as `zeroweave.initialize` takes them. One ConfigError names what
    is wrong with these sections and with the rest.
    """
    with opened(source) as given:
        problems: list[str] = []
        built = fill({key: given[key] for key in _BUILT if key in given}, auto or {}, problems)
        optimizer = _optimizer(built, problems)
        lr_scheduler = _scheduler(built, problems)
        try:
            config = Config.from_deepspeed({key: given[key] for key in given if key not in _BUILT}, auto)
        except ConfigError as error:
            if not problems:
                raise
            raise type(error)("\n".join([str(error), *(f"- {each}" for each in problems)])) from None
        refuse(problems)
    return FromDeepSpeed(config, optimizer, lr_scheduler)


def _optimizer(built: Mapping[str, Any], problems: list[str]) -> _MakeOptimizer | None:
    """What makes the optimizer. `problems` gets what is wrong with the section; the result is None then."""
    if (section := _section("optimizer", built, ("type", "params", "legacy_fusion"), problems)) is None:
        return None
    name, params = section
    kind = _OWN.get(name.lower()) or _class(torch.optim, name, torch.optim.Optimizer)
    if kind is None:
        problems.append(f"optimizer.type is {name!r}: none of torch.optim, as AdamW, Adam and SGD are")
        return None
    if kind is Lion:
        params.setdefault("lr", 1e-3)  # DeepSpeed's default
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        # DeepSpeed's Adam decays weights like AdamW unless adam_w_mode is false, and by 0 by default.
        switches = {name: params.pop(name, default) for name, default in (("adam_w_mode", True), ("torch_adam", False))}
        problems += [
            f"optimizer.params.{switch} is {value!r}: true or false"
            for switch, value in switches.items()
            if not isinstance(value, bool)
        ]
        kind = torch.optim.AdamW if switches["adam_w_mode"] else kind
        if not switches["torch_adam"]:
            params.setdefault("weight_decay", 0.0)
        params.pop("set_grad_none", None)
        for neutral, value in _NEUTRAL.items():
            if params.pop(neutral, value) is not value:
                problems.append(f"optimizer.params.{neutral}: torch's {kind.__name__} does as with {value!r}")
    if "max_grad_norm" in params:
        problems.append("optimizer.params.max_grad_norm: write gradient_clipping, beside optimizer")
        return None
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return _tried(kind, params, [nn.Parameter(torch.zeros(1))], "optimizer.params", problems)


def _scheduler(built: Mapping[str, Any], problems: list[str]) -> _MakeScheduler | None:
    """What makes the scheduler. `problems` gets what is wrong with the section; the result is None then."""
    if (section := _section("scheduler", built, ("type", "params"), problems)) is None:
        return None
    name, params = section
    if name in SCHEDULES:
        try:
            return partial(follow, SCHEDULES[name](**params))
        except ValidationError as error:
            problems += findings(error, SCHEDULES[name], "scheduler.params")
            return None
    kind = _class(torch.optim.lr_scheduler, name, LRScheduler)
    if kind is None:
        problems.append(f"scheduler.type is {name!r}: none of {', '.join(SCHEDULES)} or of torch.optim.lr_scheduler")
        return None
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    return _tried(kind, params, optimizer, "scheduler.params", problems)


def _section(
    title: str, built: Mapping[str, Any], keys: tuple[str, ...], problems: list[str]
) -> tuple[str, dict[str, Any]] | None:
    """The type and the parameters of a section. None without one, or where it is wrong, which `problems` gets."""
    if (section := built.get(title)) is None:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        problems.append(f"{title} is {section!r}: a section with a type, such as AdamW or WarmupLR, and its params")
        return None
    name, params = section["type"], section.get("params") or {}
    if not isinstance(params, Mapping):
        problems.append(f"{title}.params is {params!r}: a section of keys")
        return None
    wrong = [f"{title}.{key}: unknown; its parameters belong in {title}.params" for key in section if key not in keys]
    wrong += [left(f"{title}.params.{key}") for key, value in params.items() if value == "auto"]
    if (why := _ABSENT.get(name.lower())) is not None:
        wrong.append(f"{title}.type is {name!r}: {why}")
    problems += wrong
    return None if wrong else (name, {str(key): value for key, value in params.items()})


def _class(module: Any, name: str, base: type) -> Any:
    """The subclass of `base` that a module of torch has under exactly this name, or None."""
    kind = getattr(module, name, None)
    return kind if inspect.isclass(kind) and issubclass(kind, base) and kind is not base else None


def _tried(kind: Callable[..., Any], params: Mapping[str, Any], of: Any, where: str, problems: list[str]) -> Any:
    """What makes an object of this class with these parameters, once it has made one `of` something small.

    pydantic compares the parameters with the annotations of the class first, because its errors name them.
    """
    try:
        hints = get_type_hints(kind.__init__)
    except NameError:  # an annotation that only type checkers can read
        hints = {}
    _, *known = inspect.signature(kind).parameters.values()
    fields: dict[str, Any] = {
        each.name: (hints.get(each.name, Any), ... if each.default is each.empty else each.default) for each in known
    }
    made = partial(kind, **params)
    model = create_model(
        kind.__name__, __config__=ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True), **fields
    )
    try:
        model(**params)
        made(of)
    except ValidationError as error:
        problems += findings(error, model, where)
        return None
    except Exception as error:  # any error of a class of torch about its arguments
        problems.append(f"{where}: {error}")
        return None
    return made
