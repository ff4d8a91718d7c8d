"""A whole DeepSpeed configuration: zeroweave's config, and the optimizer and the scheduler that it describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zeroweave.config import Config
from zeroweave.config.deepspeed import fill, refuse
from zeroweave.config.files import naming, read
from zeroweave.errors import ConfigError
from zeroweave.integrations.deepspeed_optimizers import optimizer_of
from zeroweave.integrations.deepspeed_schedulers import scheduler_of

_BUILT: Final = ("optimizer", "scheduler")


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration gives `zeroweave.initialize`. None: the file has no such section."""

    config: Config
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None


def load_deepspeed(
    source: Mapping[str, Any] | str | os.PathLike[str], auto: Mapping[str, Any] | None = None
) -> FromDeepSpeed:
    """The config, the optimizer and the learning-rate scheduler that a DeepSpeed configuration describes.

    `source`, `auto`, warnings and errors: as for `Config.from_deepspeed`. The `optimizer` and `scheduler` sections
    become callables that make objects of torch.optim, as `zeroweave.initialize` takes them. What such a section asks
    for and torch does not have is in the same ConfigError as the rest.
    """
    with nullcontext() if isinstance(source, Mapping) else naming(Path(source)):
        given = source if isinstance(source, Mapping) else read(Path(source))
        problems: list[str] = []
        built = fill({key: given[key] for key in _BUILT if key in given}, auto or {}, problems)
        optimizer = optimizer_of(built.get("optimizer"), problems)
        lr_scheduler = scheduler_of(built.get("scheduler"), problems)
        try:
            config = Config.from_deepspeed({key: given[key] for key in given if key not in _BUILT}, auto)
        except ConfigError as error:
            if not problems:
                raise
            raise type(error)("\n".join([str(error), *(f"- {each}" for each in problems)])) from None
        refuse(problems)
    return FromDeepSpeed(config, optimizer, lr_scheduler)
