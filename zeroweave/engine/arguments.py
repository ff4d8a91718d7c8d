"""What `initialize` is asked for, with the checks that one rank can make alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroweave.config import Config
from zeroweave.engine.logs.log import refuse_missing
from zeroweave.engine.settings import passes_of
from zeroweave.errors import EngineError
from zeroweave.experts import find_experts
from zeroweave.optim.check import check_optimizers
from zeroweave.optim.several import Schedulers, WholeMatrices, as_one, given, members_of
from zeroweave.parameters.check import check
from zeroweave.parameters.foreign import own_parameters
from zeroweave.parameters.weights import Buffers, Weights, WeightsLike, weights_of
from zeroweave.ranks.faults import Fault
from zeroweave.ranks.signals import check_thread

Optimizers = torch.optim.Optimizer | WholeMatrices | Sequence[torch.optim.Optimizer | WholeMatrices]
OptimizerLike = Optimizers | Callable[[list[nn.Parameter]], Optimizers]


@dataclass(frozen=True)
class Arguments:
    """What `initialize` was asked for, checked on one rank alone. `experts`: see `model.specs_of`."""

    settings: Config
    optimizer: torch.optim.Optimizer | None
    whole: frozenset[int]
    """by `id`, the parameters that are updated as wholes"""
    scheduler: Any
    experts: frozenset[int]
    weights: Weights
    buffers: Buffers
    fault: Fault | None


def checked_arguments(
    model: nn.Module, optimizer: OptimizerLike | None, config: Any, lr_scheduler: Any, weights: WeightsLike | None
) -> Arguments:
    """Raises what `initialize` does for arguments that are refused."""
    settings, fault = Config.load(config), Fault.asked_for()
    if settings.checkpoint.save_on_signal is not None:
        check_thread()
    passes_of(settings)
    refuse_missing(settings)
    check(model)
    experts = find_experts(model, settings.experts)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(own_parameters(model).values()))
    passed = [] if optimizer is None else given(optimizer)
    check_optimizers(passed, model)
    one = as_one([each.optimizer for each in passed]) if passed else None
    whole = frozenset(
        id(p) for each in passed if each.whole for group in each.optimizer.param_groups for p in group["params"]
    )
    source = weights_of(model, weights)
    scheduler = _scheduler_of(lr_scheduler, one)
    return Arguments(settings, one, whole, scheduler, experts, source, Buffers(model, source), fault)


def _scheduler_of(passed: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """The scheduler itself, made here if a callable was given. EngineError for anything that is none."""
    if passed is None:
        return None
    if optimizer is None:
        raise EngineError("[ZW305] lr_scheduler needs an optimizer: pass both to zeroweave.initialize, or neither")
    made = passed(optimizer) if callable(passed) and not _is_scheduler(passed) else passed
    schedulers = list(made) if isinstance(made, list | tuple) and made else [made]
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise EngineError("[ZW305] ReduceLROnPlateau needs a metric: step it yourself after engine.step()")
        if not _is_scheduler(each):
            what = "what the callable made is" if made is not passed else "it is"
            raise EngineError(
                "[ZW305] lr_scheduler must be a scheduler such as those of torch.optim.lr_scheduler, a list of them, "
                "or a callable from the optimizer to either, for instance "
                f"lambda optimizer: CosineAnnealingLR(optimizer, T_max=100); {what} of type {type(each).__name__}"
            )
        if getattr(each, "optimizer", optimizer) not in (optimizer, *members_of(optimizer)):
            raise EngineError(
                "[ZW305] lr_scheduler moves the learning rates of another optimizer than the one that was passed"
            )
    return made if made is schedulers[0] else Schedulers(schedulers)


def _is_scheduler(value: Any) -> bool:
    return callable(getattr(value, "step", None)) and not isinstance(value, type | torch.optim.Optimizer)
