"""What can be no graph at all, by config and optimizer."""

from __future__ import annotations

import torch

from zeroweave.engine.parts import EngineParts
from zeroweave.optim.rates import why_not_captured
from zeroweave.optim.several import kind_of


def captures_on(device: torch.device) -> bool:
    """Does such a device have graphs?"""
    return device.type == "cuda"


def never_captured(parts: EngineParts, looks: bool) -> str | None:
    """Why no step of an engine can be a graph, by its config and optimizer; None if steps may be. On all ranks alike.

    `looks`: are steps skipped whose gradients are not finite?
    """
    config, optimizer = parts.config, parts.optimizer
    debug, offload = config.debug, config.offload
    moved = offload.optimizer != "none" or offload.params or offload.activations
    checked = [name for name, on in debug.model_dump().items() if on is True and name != "keep_gradient_targets"]
    if not captures_on(parts.device):
        return f"the engine computes on {parts.device.type}"
    if optimizer is None:
        return "there is no optimizer"
    if moved:
        return "with offload, host memory takes part in each step"
    if config.activations.free_threshold_bytes is not None:
        return "activations.free_threshold_bytes looks for tensors on the host"
    if config.gather_after_step:
        return "gather_after_step shows new parameters after each step"
    if config.on_nonfinite == "raise":
        return "on_nonfinite 'raise' needs the gradients on the host before anything is written"
    if checked:
        return f"debug.{checked[0]} waits on the host"
    if optimizer.has_matrices:
        return f"whole matrices (of {kind_of(optimizer.optimizer)}) travel between ranks as the host says"
    if not optimizer.by_bucket:
        return f"{kind_of(optimizer.optimizer)} is none of torch's, or somebody listens to its steps"
    return why_not_captured(optimizer.optimizer, looks)
