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
    """What all rules hand to their kernels for one range."""

    masters: tuple[torch.Tensor, torch.Tensor, bool]
    gradient: Scaled
    found: torch.Tensor | None
    """1 where nothing is to be written; float32 on the device, 0-dim"""

    def flags(self) -> dict[str, Any]:
        factor = self.gradient.factor
        kind = 0 if factor is None else 1 if isinstance(factor, float) else 2
        return {"SPLIT": self.masters[2], "FACTOR": kind, "FOUND": self.found is not None}

    def pointers(self) -> tuple[Any, ...]:
        """`factor` and `found`, or what stands in for them."""
        factor, values = self.gradient.factor, self.gradient.values
        return values if factor is None else factor, values if self.found is None else self.found


class Kernels(Protocol):
    """What `_triton.rules` has, or what stands in for it."""

    BLOCK: int
    adagrad: Any
    adam: Any
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

    def launch(
        self,
        kernels: Kernels,
        launch: Launch,
        moments: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        step: int,
        scalars: torch.Tensor | None,
        first: bool,
    ) -> None:
        """Issues the update. `first`: moments were just made. `scalars`: see the function of that name; else `step`."""

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        """What depends on the learning rate and the step, float32 on the device, where the rate is there."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class AdamRule:
    """Adam and AdamW."""

    counts, born = True, False

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled

    def _coupled(self, group: Mapping[str, Any]) -> bool:
        return not (self._decoupled or group.get("decoupled_weight_decay", False))

    def fits(self, group: Mapping[str, Any]) -> bool:
        numbers = all(map(_number, (*group["betas"], group["eps"], group["weight_decay"])))
        return numbers and group["eps"] > 0 and not group["differentiable"]

    def moments(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def scalars(self, group: Mapping[str, Any], rate: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
        (beta1, beta2), rate = group["betas"], rate.double().reshape(())
        step = step.double() if isinstance(step, torch.Tensor) else torch.full_like(rate, step)
        keep = 1 - rate * group["weight_decay"]
        return torch.stack([keep, rate / (1 - beta1**step), (1 - beta2**step).sqrt()]).float()

    def launch(
        self,
        kernels: Kernels,
        launch: Launch,
        moments: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        step: int,
        scalars: torch.Tensor | None,
        first: bool,
    ) -> None:
        (master, remainder, _), gradient = launch.masters, launch.gradient.values
        beta1, beta2 = group["betas"]
        numbers = (0.0, 0.0, 0.0)
        if scalars is None:
            rate = float(group["lr"])
            numbers = (
                1 - rate * group["weight_decay"],
                rate / (1 - beta1**step),
                math.sqrt(1 - beta2**step),
            )
        largest = moments[2] if group["amsgrad"] else moments[1]
        kernels.adam[kernels.programs(gradient.numel())](
            master, remainder, gradient, moments[0], moments[1], largest, *launch.pointers(),
            gradient if scalars is None else scalars, gradient.numel(), *numbers, float(group["weight_decay"]),
            1 - beta1, beta2, 1 - beta2, group["eps"],
            DEVICE=scalars is not None, COUPLED=self._coupled(group) and group["weight_decay"] != 0,
            AMSGRAD=group["amsgrad"], MAXIMIZE=group["maximize"], SIZE=kernels.BLOCK, enable_fp_fusion=False,
            **launch.flags(),
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

    def launch(
        self,
        kernels: Kernels,
        launch: Launch,
        moments: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        step: int,
        scalars: torch.Tensor | None,
        first: bool,
    ) -> None:
        (master, remainder, _), gradient = launch.masters, launch.gradient.values
        kernels.sgd[kernels.programs(gradient.numel())](
            master, remainder, gradient, moments[0] if moments else gradient, *launch.pointers(),
            gradient if scalars is None else scalars, gradient.numel(),
            float(group["lr"]) if scalars is None else 0.0, float(group["weight_decay"]), float(group["momentum"]),
            1.0 - group["dampening"], DEVICE=scalars is not None, DECAY=group["weight_decay"] != 0,
            MOMENTUM=bool(moments), FIRST=first, NESTEROV=group["nesterov"], MAXIMIZE=group["maximize"],
            SIZE=kernels.BLOCK, enable_fp_fusion=False, **launch.flags(),
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
        return (rate.double() / (1 + (step - 1) * group["lr_decay"])).float()

    def launch(
        self,
        kernels: Kernels,
        launch: Launch,
        moments: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        step: int,
        scalars: torch.Tensor | None,
        first: bool,
    ) -> None:
        (master, remainder, _), gradient = launch.masters, launch.gradient.values
        rate = 0.0 if scalars is not None else float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        kernels.adagrad[kernels.programs(gradient.numel())](
            master, remainder, gradient, moments[0], *launch.pointers(), gradient if scalars is None else scalars,
            gradient.numel(), rate, float(group["weight_decay"]), group["eps"], DEVICE=scalars is not None,
            DECAY=group["weight_decay"] != 0, MAXIMIZE=group["maximize"], SIZE=kernels.BLOCK, enable_fp_fusion=False,
            **launch.flags(),
        )  # fmt: skip


RULES: Final[Mapping[type[torch.optim.Optimizer], Rule]] = {
    torch.optim.Adam: AdamRule(decoupled=False),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SGDRule(),
    torch.optim.Adagrad: AdagradRule(),
}
