"""Hooks and wrappers of an optimizer's step."""

from __future__ import annotations

import torch


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step` calls hooks, its own or global ones. Why: those expect one call a step."""
    from torch.optim import optimizer as module

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or module._global_optimizer_pre_hooks
        or module._global_optimizer_post_hooks
    )


def is_step_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer.step` was set on the object. Learning rate schedulers do not count: theirs only notes the
    call. Why: a wrapper of a user expects one call a step."""
    return "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
