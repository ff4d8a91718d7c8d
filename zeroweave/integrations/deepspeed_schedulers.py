"""The `scheduler` section of a DeepSpeed configuration, with torch's classes.

DeepSpeed's own schedules become a `LambdaLR` with the same learning rate in every optimizer step. They start one step
late: the first step has the lowest rate, and so has the second wherever a warm-up begins there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, Protocol, cast

import torch
from pydantic import Field, ValidationError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroweave.config.deepspeed import left
from zeroweave.config.messages import findings
from zeroweave.config.sections import Section

_Make = Callable[[torch.optim.Optimizer], LRScheduler]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0)]
_Steps = Annotated[int, Field(ge=1)]


class _Shape(Protocol):
    """A schedule of DeepSpeed's. `own`: the learning rate that the optimizer was made with."""

    def peak(self, own: float) -> float:
        """The rate that the others are given as multiples of."""

    def rate(self, step: int, own: float) -> float:
        """The rate of the optimizer step before which there were `step` others."""


class _Warmup(Section):
    warmup_num_steps: _Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def risen(self, step: int) -> float | None:
        """From 0 to 1; None when it is over."""
        steps, index = max(2, self.warmup_num_steps), step - 1
        if index >= steps:
            return None
        if index < 0:
            return 0.0
        return math.log(index + 1) / math.log(steps) if self.warmup_type == "log" else index / steps


class _WarmupLR(_Warmup):
    warmup_min_lr: _Share = 0.0
    warmup_max_lr: _Positive | None = None

    def peak(self, own: float) -> float:
        return own if self.warmup_max_lr is None else self.warmup_max_lr

    def rate(self, step: int, own: float) -> float:
        risen = self.risen(step)
        share = self.fallen(step - 1) if risen is None else risen
        return self.warmup_min_lr + (self.peak(own) - self.warmup_min_lr) * share

    def fallen(self, index: int) -> float:
        return 1.0


class _WarmupDecayLR(_WarmupLR):
    total_num_steps: _Steps
    warmup_max_lr: _Positive | None = 0.001

    def fallen(self, index: int) -> float:
        return max(0.0, (self.total_num_steps - index) / max(1, self.total_num_steps - max(2, self.warmup_num_steps)))


class _WarmupCosineLR(_Warmup):
    total_num_steps: _Steps
    warmup_min_ratio: _Share = 0.0
    cos_min_ratio: _Share = 0.0001

    def peak(self, own: float) -> float:
        return own

    def rate(self, step: int, own: float) -> float:
        if step == 0:
            return 0.0
        if (risen := self.risen(step)) is not None:
            return own * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * risen)
        warm = max(2, self.warmup_num_steps)
        done = min(1.0, (step - warm) / max(1, self.total_num_steps - warm))
        return own * (self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


class _LRRangeTest(Section):
    lr_range_test_min_lr: _Positive = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def peak(self, own: float) -> float:
        return self.lr_range_test_min_lr

    def rate(self, step: int, own: float) -> float:
        intervals = step / self.lr_range_test_step_size
        return self.lr_range_test_min_lr * (
            1 + self.lr_range_test_step_rate * (math.floor(intervals) if self.lr_range_test_staircase else intervals)
        )


_Kinds = _WarmupLR | _WarmupDecayLR | _WarmupCosineLR | _LRRangeTest
_SHAPES: Final[dict[str, type[_Kinds]]] = {
    "WarmupLR": _WarmupLR,
    "WarmupDecayLR": _WarmupDecayLR,
    "WarmupCosineLR": _WarmupCosineLR,
    "LRRangeTest": _LRRangeTest,
}

_ABSENT: Final = {
    "OneCycle": "betas are not cycled with the learning rate: torch's OneCycleLR, with its own params, is nearest",
    "ReduceLROnPlateau": "it needs a metric: step it yourself after engine.step()",
}


def scheduler_of(section: Any, problems: list[str]) -> _Make | None:
    """What makes the scheduler of a section, from the optimizer. `problems` gets what is wrong with the section.

    None without a section, or where anything is wrong.
    """
    if section is None:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        problems.append(f"scheduler is {section!r}: a section with a type, such as WarmupLR, and its params")
        return None
    name, params = section["type"], section.get("params") or {}
    if not isinstance(params, Mapping):
        problems.append(f"scheduler.params is {params!r}: a section of keys")
        return None
    wrong = [f"scheduler.{key}: unknown; remove it" for key in section if key not in ("type", "params")]
    wrong += [left(f"scheduler.params.{key}") for key, value in params.items() if value == "auto"]
    if name in _ABSENT:
        wrong.append(f"scheduler.type is {name!r}: {_ABSENT[name]}")
    problems += wrong
    if wrong:
        return None
    return _shaped(_SHAPES[name], params, problems) if name in _SHAPES else _torch(name, params, problems)


def _shaped(kind: type[_Kinds], params: Mapping[str, Any], problems: list[str]) -> _Make | None:
    try:
        return partial(_follow, kind(**params))
    except ValidationError as error:
        problems += findings(error, kind, "scheduler.params")
        return None


def _follow(shape: _Shape, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """LambdaLR multiplies the rate that it finds: that becomes the schedule's peak."""

    def factor(own: float, peak: float) -> Callable[[int], float]:
        return lambda step: shape.rate(step, own) / peak

    factors = []
    for group in optimizer.param_groups:
        own = float(group["lr"])
        peak = shape.peak(own)
        factors.append(factor(own, peak))
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group.pop("initial_lr", None)  # of an earlier scheduler, which this one would go on from
    return LambdaLR(optimizer, factors)


def _torch(name: str, params: Mapping[str, Any], problems: list[str]) -> _Make | None:
    """A scheduler of torch's, tried out on an optimizer."""
    kind = getattr(torch.optim.lr_scheduler, name, None)
    if not inspect.isclass(kind) or not issubclass(kind, LRScheduler) or kind is LRScheduler:
        problems.append(f"scheduler.type is {name!r}: none of {', '.join(_SHAPES)} or of torch.optim.lr_scheduler")
        return None
    make: _Make = partial(cast(Any, kind), **params)
    try:
        make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))
    except Exception as error:  # whatever a class of torch raises for an argument that it does not take
        problems.append(f"scheduler.params: {error}")
        return None
    return make
