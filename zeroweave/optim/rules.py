"""How kernels update by the rules of torch's optimizers, by their exact classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

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
    found: torch.Tensor | None
    """1 where nothing is to be written; float32 on the device, 0-dim"""
    moments: Sequence[torch.Tensor]
    first: bool
    """were they just made?"""
    options: Mapping[str, Any]
    """of the group"""
    step: int
    """which one this is, from 1"""
    scalars: torch.Tensor | None
    """see `Rule.scalars`; None: the host computes them from `options` and `step`"""
    position: int
    """of its first element, in the flat"""

    def sources(self) -> tuple[torch.Tensor, ...]:
        """Master, remainder and gradient."""
        return *self.masters[:2], self.gradient.values

    def pointers(self) -> tuple[Any, ...]:
        """`factor`, `found` and `scalars`, or what stands in for them, and the number of elements."""
        factor, values = self.gradient.factor, self.gradient.values
        found, scalars = (values if each is None else each for each in (self.found, self.scalars))
        return values if factor is None else factor, found, scalars, values.numel()

    def flags(self, kernels: Kernels) -> dict[str, Any]:
        """What all kernels are compiled for."""
        factor = self.gradient.factor
        return {
            "SPLIT": self.masters[2],
            "FACTOR": 0 if factor is None else 1 if isinstance(factor, float) else 2,
            "FOUND": self.found is not None,
            "DEVICE": self.scalars is not None,
            "MAXIMIZE": self.options["maximize"],
            "SIZE": kernels.BLOCK,
            "enable_fp_fusion": False,
        }

    def programs(self, kernels: Kernels) -> tuple[int]:
        return kernels.programs(self.gradient.values.numel())


class Kernels(Protocol):
    """What `_triton.rules` has, or what stands in for it."""

    BLOCK: int
    adagrad: Any
    adam: Any
    compact_adam: Any
    sgd: Any

    def programs(self, numel: int) -> tuple[int]: ...


class Rule(Protocol):
    """How one class of optimizers updates."""

    counts: bool
    """has it step counters?"""
    born: bool
    """are its states there before the first step?"""

    def fits(self, group: Mapping[str, Any]) -> bool:
        """Can the kernel do what the options of a group ask for?"""

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of what it keeps of each element, in the order of torch."""

    def launch(self, kernels: Kernels, launch: Launch) -> None:
        """Issues the update."""

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        """What depends on the learning rate and the step, float32 on the device, where the rate is there.

        `step`: one [], or several [n]; a row for each, [some] or [n, some].
        """


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class AdamRule:
    """Adam and AdamW. `compact`: of masters and moments of few bits, whose codes come first, and then their scales."""

    counts, born = True, False

    def __init__(self, decoupled: bool, compact: bool = False) -> None:
        self._decoupled, self._compact = decoupled, compact

    def _coupled(self, group: Mapping[str, Any]) -> bool:
        return not (self._decoupled or group.get("decoupled_weight_decay", False))

    def fits(self, group: Mapping[str, Any]) -> bool:
        numbers = all(map(_number, (*group["betas"], group["eps"], group["weight_decay"])))
        plain = not group["differentiable"] and not (self._compact and group["amsgrad"])
        return numbers and group["eps"] > 0 and plain

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        (beta1, beta2), rate = group["betas"], rate.double().reshape(())
        step = step.double() if isinstance(step, torch.Tensor) else torch.full_like(rate, step)
        keep = (1 - rate * group["weight_decay"]).expand_as(step)
        return torch.stack([keep, rate / (1 - beta1**step), (1 - beta2**step).sqrt(), step], dim=-1).float()

    def launch(self, kernels: Kernels, launch: Launch) -> None:
        group, moments = launch.options, launch.moments
        beta1, beta2 = group["betas"]
        numbers = (0.0, 0.0, 0.0)
        if launch.scalars is None:
            rate = float(group["lr"])
            numbers = (
                1 - rate * group["weight_decay"],
                rate / (1 - beta1**launch.step),
                math.sqrt(1 - beta2**launch.step),
            )
        more = (*numbers, float(group["weight_decay"]), 1 - beta1, beta2, 1 - beta2, group["eps"])
        flags = {"COUPLED": self._coupled(group) and group["weight_decay"] != 0, **launch.flags(kernels)}
        if self._compact:
            kernels.compact_adam[launch.programs(kernels)](
                *launch.sources(), *moments, *launch.pointers(), *more, launch.position, launch.step, **flags
            )
            return
        largest = moments[2] if group["amsgrad"] else moments[1]
        kernels.adam[launch.programs(kernels)](
            *launch.sources(), moments[0], moments[1], largest, *launch.pointers(), *more,
            AMSGRAD=group["amsgrad"], **flags,
        )  # fmt: skip


class SGDRule:
    """SGD, with momentum or without."""

    counts, born = False, False

    def fits(self, group: Mapping[str, Any]) -> bool:
        numbers = all(map(_number, (group["momentum"], group["dampening"], group["weight_decay"])))
        return numbers and not group["differentiable"]

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        return rate.float()

    def launch(self, kernels: Kernels, launch: Launch) -> None:
        group = launch.options
        kernels.sgd[launch.programs(kernels)](
            *launch.sources(), launch.moments[0] if launch.moments else launch.gradient.values, *launch.pointers(),
            float(group["lr"]) if launch.scalars is None else 0.0, float(group["weight_decay"]),
            float(group["momentum"]), 1.0 - group["dampening"], DECAY=group["weight_decay"] != 0,
            MOMENTUM=bool(launch.moments), FIRST=launch.first, NESTEROV=group["nesterov"], **launch.flags(kernels),
        )  # fmt: skip


class AdagradRule:
    """Adagrad."""

    counts, born = True, True

    def fits(self, group: Mapping[str, Any]) -> bool:
        numbers = all(map(_number, (group["lr_decay"], group["eps"], group["weight_decay"])))
        return numbers and group["eps"] > 0 and not group["differentiable"]

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        step = step.double() if isinstance(step, torch.Tensor) else step
        return (rate.double() / (1 + (step - 1) * group["lr_decay"])).float().unsqueeze(-1)

    def launch(self, kernels: Kernels, launch: Launch) -> None:
        group = launch.options
        rate = 0.0 if launch.scalars is not None else float(group["lr"]) / (1 + (launch.step - 1) * group["lr_decay"])
        kernels.adagrad[launch.programs(kernels)](
            *launch.sources(), launch.moments[0], *launch.pointers(), rate, float(group["weight_decay"]), group["eps"],
            DECAY=group["weight_decay"] != 0, **launch.flags(kernels),
        )  # fmt: skip


RULES: Final[Mapping[type[torch.optim.Optimizer], Rule]] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SGDRule(),
    torch.optim.Adagrad: AdagradRule(),
}

COMPACT_RULES: Final[Mapping[type[torch.optim.Optimizer], Rule]] = {
    torch.optim.Adam: AdamRule(decoupled=False, compact=True),
    torch.optim.AdamW: AdamRule(decoupled=True, compact=True),
}
"""Of those whose states have few bits."""
