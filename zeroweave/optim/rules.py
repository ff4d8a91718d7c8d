"""How kernels update by the rules of optimizers, by their exact classes: those of torch, and Lion."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from zeroweave.optim.lion import Lion
from zeroweave.optim.scaler import Scaled


class Masters(NamedTuple):
    """Where a kernel finds the masters of a bucket [numel / world]."""

    master: torch.Tensor
    """float32, or the bfloat16 of split ones"""
    remainder: torch.Tensor | None = None

    def of(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """A range of both, and whether they are split."""
        part = self.master[start:stop]
        return part, part if self.remainder is None else self.remainder[start:stop], self.remainder is not None


class Launch(NamedTuple):
    """The update of one range: what its kernel reads and writes."""

    masters: tuple[torch.Tensor, torch.Tensor, bool]
    gradient: Scaled
    moments: Sequence[torch.Tensor]
    first: bool
    """true if they were just made"""
    options: Mapping[str, Any]
    """of the group"""
    step: int
    """which one this is, from 1"""
    position: int
    """of its first element, in the flat"""

    def issue(self, kernels: Kernels, own: Own) -> None:
        """Launches the kernel with what all kernels take, and its own. The gradient stands in for an absent tensor."""
        factor, values = self.gradient.factor, self.gradient.values
        own.kernel[kernels.programs(values.numel())](
            *self.masters[:2], values, *own.moments, values if factor is None else factor,
            values.numel(), *own.numbers, **own.flags,
            SPLIT=self.masters[2], FACTOR=0 if factor is None else 1 if isinstance(factor, float) else 2,
            MAXIMIZE=self.options["maximize"], SIZE=kernels.BLOCK, enable_fp_fusion=False,
        )  # fmt: skip


class Own(NamedTuple):
    """What one kernel takes that others do not, in its order."""

    kernel: Any
    moments: Sequence[torch.Tensor]
    numbers: Sequence[float]
    flags: Mapping[str, bool]


class Kernels(Protocol):
    """What `_triton.rules` has, or what replaces it."""

    BLOCK: int
    adagrad: Any
    adam: Any
    compact_adam: Any
    lion: Any
    sgd: Any

    def programs(self, numel: int) -> tuple[int]: ...


class Rule(ABC):
    """How one class of optimizers updates."""

    counts = False
    """true if it has step counters"""
    born = False
    """true if its states are there before the first step"""
    numbers: tuple[str, ...]
    """the options that a kernel takes as numbers, not as tensors"""

    def fits(self, group: Mapping[str, Any]) -> bool:
        """True if the kernel can do what the options of a group ask for."""
        values = [group[name] for name in self.numbers] + [*group.get("betas", ())]
        return all(map(_number, values)) and group.get("eps", 1) > 0 and not group.get("differentiable")

    @abstractmethod
    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of what it keeps of each element, in the order of torch."""

    @abstractmethod
    def own(self, kernels: Kernels, launch: Launch) -> Own:
        """What its kernel takes for an update."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class AdamRule(Rule):
    """Adam and AdamW. `compact`: of masters and moments of few bits, whose codes come first, and then their scales."""

    counts, numbers = True, ("eps", "weight_decay")

    def __init__(self, decoupled: bool, compact: bool = False) -> None:
        self._decoupled, self._compact = decoupled, compact

    def fits(self, group: Mapping[str, Any]) -> bool:
        return super().fits(group) and not (self._compact and group["amsgrad"])

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def own(self, kernels: Kernels, launch: Launch) -> Own:
        group, moments, step = launch.options, launch.moments, launch.step
        (beta1, beta2), rate, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
        scalars = 1 - rate * decay, rate / (1 - beta1**step), math.sqrt(1 - beta2**step)
        numbers = (*scalars, decay, 1 - beta1, beta2, 1 - beta2, group["eps"])
        decoupled = self._decoupled or group.get("decoupled_weight_decay", False)
        flags = {"COUPLED": not decoupled and decay != 0}
        if self._compact:
            return Own(kernels.compact_adam, moments, (*numbers, launch.position, step), flags)
        largest = moments[2] if group["amsgrad"] else moments[1]
        return Own(kernels.adam, (*moments[:2], largest), numbers, {**flags, "AMSGRAD": group["amsgrad"]})


class SGDRule(Rule):
    """SGD, with momentum or without."""

    numbers = ("momentum", "dampening", "weight_decay")

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def own(self, kernels: Kernels, launch: Launch) -> Own:
        group, decay, momentum = launch.options, float(launch.options["weight_decay"]), bool(launch.moments)
        flags = {"DECAY": decay != 0, "MOMENTUM": momentum, "FIRST": launch.first, "NESTEROV": group["nesterov"]}
        numbers = float(group["lr"]), decay, float(group["momentum"]), 1.0 - group["dampening"]
        return Own(kernels.sgd, launch.moments if momentum else [launch.gradient.values], numbers, flags)


class AdagradRule(Rule):
    """Adagrad."""

    counts, born, numbers = True, True, ("lr_decay", "eps", "weight_decay")

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def own(self, kernels: Kernels, launch: Launch) -> Own:
        group, decay = launch.options, float(launch.options["weight_decay"])
        rate = float(group["lr"]) / (1 + (launch.step - 1) * group["lr_decay"])
        return Own(kernels.adagrad, launch.moments, (rate, decay, group["eps"]), {"DECAY": decay != 0})


class LionRule(Rule):
    """Lion."""

    numbers = ("weight_decay",)

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def own(self, kernels: Kernels, launch: Launch) -> Own:
        (beta1, beta2), rate = launch.options["betas"], float(launch.options["lr"])
        numbers = (1 - rate * launch.options["weight_decay"], rate, beta1, 1 - beta1, beta2, 1 - beta2)
        return Own(kernels.lion, launch.moments, numbers, {})


RULES: Final[Mapping[type[torch.optim.Optimizer], Rule]] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SGDRule(),
    torch.optim.Adagrad: AdagradRule(),
    Lion: LionRule(),
}

COMPACT_RULES: Final[Mapping[type[torch.optim.Optimizer], Rule]] = {
    torch.optim.Adam: AdamRule(decoupled=False, compact=True),
    torch.optim.AdamW: AdamRule(decoupled=True, compact=True),
}
"""Of those whose states have few bits."""
