"""`train()` and `eval()` of optimizers that have them: both move the parameters, as in schedule-free training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any

import torch

from zeroweave.optim.groups import Groups
from zeroweave.optim.several import members_of


def modes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Which of the two methods the optimizer's class has."""
    return [mode for mode in ("train", "eval") if callable(getattr(type(optimizer), mode, None))]


def serve(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    shown: Callable[[str], AbstractContextManager[None]],
    ends: ExitStack,
) -> None:
    """Shows both methods fragments, in the context `shown(call)`, until `ends`. In a step they see these anyway."""
    for member in members_of(optimizer):
        for mode in modes_of(member):
            vars(member).update({mode: _seeing(getattr(member, mode), groups, shown, f"optimizer.{mode}()")})
            ends.callback(vars(member).pop, mode, None)


def _seeing(
    method: Callable[..., Any], groups: Groups, shown: Callable[[str], AbstractContextManager[None]], what: str
) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with shown(what) if groups.at_rest else nullcontext():
            return method(*args, **options)

    return call
