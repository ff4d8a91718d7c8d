"""A whole DeepSpeed configuration: zeroweave's config, and the optimizer and the scheduler that it describes.

DeepSpeed's learning-rate schedules become a `LambdaLR` that gives every optimizer step the same rate as DeepSpeed does.
"""

from __future__ import annotations

import inspect
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field, ValidationError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroweave.config import Config
from zeroweave.config.config import opened
from zeroweave.config.deepspeed import fill, left, refuse
from zeroweave.config.messages import findings
from zeroweave.config.sections import Section
from zeroweave.errors import ConfigError
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
    if name in _SCHEDULES:
        try:
            return partial(_follow, _SCHEDULES[name](**params))
        except ValidationError as error:
            problems += findings(error, _SCHEDULES[name], "scheduler.params")
            return None
    kind = _class(torch.optim.lr_scheduler, name, LRScheduler)
    if kind is None:
        problems.append(f"scheduler.type is {name!r}: none of {', '.join(_SCHEDULES)} or of torch.optim.lr_scheduler")
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
    """What makes an object of this class with these parameters, once it has made one `of` something small."""
    made = partial(kind, **params)
    try:
        made(of)
    except Exception as error:  # any error of a class of torch about its arguments
        problems.append(f"{where} is {dict(params)!r}: {error}")
        return None
    return made


# ---------------------------------------------------------------------- DeepSpeed's learning-rate schedules
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0)]
_Steps = Annotated[int, Field(ge=1)]


class _Schedule(Section):
    """The parameters of a schedule. `own`: the learning rate that the optimizer was made with."""

    def peak(self, own: float) -> float:
        """The rate of which `share` returns multiples."""
        return own

    @abstractmethod
    def share(self, step: int, own: float) -> float:
        """The multiple for the optimizer step that follows on `step` others."""


class _Warmup(_Schedule):
    """A warm-up begins one step late, as in DeepSpeed: the second step has the rate of the first."""

    warmup_num_steps: _Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"

    @property
    def steps(self) -> int:
        return max(2, self.warmup_num_steps)

    def risen(self, step: int) -> float | None:
        """From 0 to 1; None after the warm-up."""
        if step > self.steps:
            return None
        done = max(0, step - 1)
        return math.log(done + 1) / math.log(self.steps) if self.warmup_type == "log" else done / self.steps


class _WarmupLR(_Warmup):
    warmup_min_lr: _Share = 0.0
    warmup_max_lr: _Positive | None = None

    def peak(self, own: float) -> float:
        return own if self.warmup_max_lr is None else self.warmup_max_lr

    def share(self, step: int, own: float) -> float:
        risen = self.risen(step)
        least = self.warmup_min_lr / self.peak(own)
        return least + (1 - least) * (self.fallen(step - 1) if risen is None else risen)

    def fallen(self, done: int) -> float:
        return 1.0


class _WarmupDecayLR(_WarmupLR):
    total_num_steps: _Steps
    warmup_max_lr: _Positive | None = 0.001

    def fallen(self, done: int) -> float:
        return max(0.0, (self.total_num_steps - done) / max(1, self.total_num_steps - self.steps))


class _WarmupCosineLR(_Warmup):
    total_num_steps: _Steps
    warmup_min_ratio: _Share = 0.0
    cos_min_ratio: _Share = 0.0001

    def share(self, step: int, own: float) -> float:
        if step == 0:
            return 0.0
        if (risen := self.risen(step)) is not None:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * risen
        done = min(1.0, (step - self.steps) / max(1, self.total_num_steps - self.steps))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2


class _LRRangeTest(_Schedule):
    lr_range_test_min_lr: _Positive = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def peak(self, own: float) -> float:
        return self.lr_range_test_min_lr

    def share(self, step: int, own: float) -> float:
        intervals = step / self.lr_range_test_step_size
        return 1 + self.lr_range_test_step_rate * (math.floor(intervals) if self.lr_range_test_staircase else intervals)


_SCHEDULES: Final[Mapping[str, type[_Schedule]]] = {
    "WarmupLR": _WarmupLR,
    "WarmupDecayLR": _WarmupDecayLR,
    "WarmupCosineLR": _WarmupCosineLR,
    "LRRangeTest": _LRRangeTest,
}
"""By the names that DeepSpeed has for them."""


def _follow(schedule: _Schedule, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Set each group's rate to the peak of its schedule, which LambdaLR multiplies by the shares."""
    factors: list[Callable[[int], float]] = []
    for group in optimizer.param_groups:
        own = float(group["lr"])
        peak = schedule.peak(own)
        factors.append(lambda step, own=own: schedule.share(step, own))  # type: ignore[misc]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group.pop("initial_lr", None)  # an earlier scheduler's, from which LambdaLR would continue
    return LambdaLR(optimizer, factors)
