"""Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion, as torch's optimizers are: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    With gradient g, momentum m and learning rate lr, where decay is `weight_decay` and b1, b2 are `betas`:

        parameter = parameter * (1 - lr * decay) - lr * sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g

    `params`: parameters, or groups of them. `lr`: a number, or a 0-dim tensor. `maximize`: g is the negative gradient.
    NaN stays NaN. The momentum, `state[p]["exp_avg"]`, has the parameter's shape and dtype. The host reads no learning
    rate that is a tensor.

    Raises:
        ValueError: a learning rate or weight decay below 0, or a beta that is not in [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0:
            raise ValueError(f"[ZW401] lr is {lr}: a number of at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"[ZW401] betas are {betas}: two numbers of at least 0 and below 1")
        if weight_decay < 0:
            raise ValueError(f"[ZW401] weight_decay is {weight_decay}: a number of at least 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)  # other implementations have none

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the parameters that have gradients; what `closure` returns, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Each product and each sum is rounded, as in the kernel: so the signs are the same."""
        state, (beta1, beta2), rate = self.state[parameter], group["betas"], group["lr"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum = state["exp_avg"]
        if isinstance(rate, torch.Tensor):
            rate = rate.double()  # what it decays by is computed as from a number
        if group["maximize"]:
            gradient = -gradient
        mixed = (momentum * beta1).add_(gradient * (1 - beta1))
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0, which would hide it
        parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction.mul_(rate))
        momentum.mul_(beta2).add_(gradient * (1 - beta2))
