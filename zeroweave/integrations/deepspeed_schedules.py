"""DeepSpeed's learning-rate schedules as a `LambdaLR` that gives every optimizer step the same rate as DeepSpeed does.

A warm-up begins one step late, as in DeepSpeed: the second step has the rate of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

import torch
from pydantic import Field
from torch.optim.lr_scheduler import LambdaLR

from zeroweave.config.sections import Section

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0)]
_Steps = Annotated[int, Field(ge=1)]


class Schedule(Section):
    """The parameters of a schedule. `own`: the learning rate that the optimizer was made with."""

    def peak(self, own: float) -> float:
        """The rate of which `share` returns multiples."""
        return own

    def share(self, step: int, own: float) -> float:
        """The multiple for the optimizer step that follows on `step` others."""
        raise NotImplementedError


class _Warmup(Schedule):
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


class _LRRangeTest(Schedule):
    lr_range_test_min_lr: _Positive = 1e-3
    lr_range_test_step_size: _Steps = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def peak(self, own: float) -> float:
        return self.lr_range_test_min_lr

    def share(self, step: int, own: float) -> float:
        intervals = step / self.lr_range_test_step_size
        return 1 + self.lr_range_test_step_rate * (math.floor(intervals) if self.lr_range_test_staircase else intervals)


SCHEDULES: Final[Mapping[str, type[Schedule]]] = {
    "WarmupLR": _WarmupLR,
    "WarmupDecayLR": _WarmupDecayLR,
    "WarmupCosineLR": _WarmupCosineLR,
    "LRRangeTest": _LRRangeTest,
}
"""By the names that DeepSpeed has for them."""


def _factor(schedule: Schedule, own: float) -> Callable[[int], float]:
    return lambda step: schedule.share(step, own)


def follow(schedule: Schedule, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Set each group's rate to the peak of its schedule, which LambdaLR multiplies by the shares."""
    factors: list[Callable[[int], float]] = []
    for group in optimizer.param_groups:
        own = float(group["lr"])
        peak = schedule.peak(own)
        factors.append(_factor(schedule, own))
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(peak)
        else:
            group["lr"] = peak
        group.pop("initial_lr", None)  # an earlier scheduler's, from which LambdaLR would continue
    return LambdaLR(optimizer, factors)
