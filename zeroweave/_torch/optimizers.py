"""Who listens to the step of an optimizer."""

from __future__ import annotations

from typing import Any

import torch


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` calls hooks, its own or global ones. Why: those expect one call a step."""
    from torch.optim import optimizer as module

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or module._global_optimizer_pre_hooks
        or module._global_optimizer_post_hooks
    )


def is_step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether someone set `optimizer.step` on the object, learning rate schedulers (which only note that it
    was called) left out. Why: a wrapper of a user expects one call a step."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")


def without_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of `optimizer`, but for its hooks and for a `step` of its own. Why: a copy that is tried out calls
    nobody, and `copy.deepcopy` of an optimizer leaves out all attributes but three."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }


def step_unheard(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without the hooks for all optimizers. Why: torch wraps `step` in a function
    that calls these."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)
