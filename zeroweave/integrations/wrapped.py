"""What the bridges to training libraries share: a model that is called through its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroweave.comm.process_group import device_of
from zeroweave.config import Config
from zeroweave.engine import Engine
from zeroweave.errors import ConfigError, ParameterError, UnsupportedError

ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]


class ZeroweaveModel(nn.Module):
    """The user's model, `module`, called through its `engine`; as `DistributedDataParallel` is around one.

    `convert` is applied to what the model returns. Attributes that are not here are the user's module's.
    """

    def __init__(self, engine: Engine, convert: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.module, self.engine = engine.module, engine
        self._convert = convert

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @torch.compiler.disable  # a library may compile what it wraps; the engine compiles by itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.engine(*args, **kwargs)
        return output if self._convert is None else self._convert(output)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that wait. Where none do, as after each step, nothing happens."""
        drop(self.engine, super().zero_grad)

    def no_sync(self) -> AbstractContextManager[None]:
        """What libraries enter around backwards that end no accumulation.

        Stage 1 adds gradients up locally inside. Stages 2 and 3 reduce them in every backward, to hold no full
        gradient; `engine.no_sync()` does it there as well.
        """
        return self.engine.no_sync() if self.engine.config.stage == 1 else nullcontext()


def drop(engine: Engine, zero_grad: Callable[[], None]) -> None:
    """`zero_grad()` of the user's own model or optimizer, which refuses where gradients wait; then the engine's."""
    try:
        zero_grad()
    except ParameterError:
        engine.zero_grad()


def settings_of(given: ConfigLike | None, library: str) -> Config:
    """The config that was `given`. ConfigError for what `library` decides, or keeps, when it has an engine."""
    config = Config.load(given)
    if config.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"[ZW804] gradient_accumulation_steps in zeroweave's config: {library} counts micro-steps; tell it"
        )
    if config.checkpoint.save_on_signal is not None:
        raise ConfigError(
            f"[ZW804] checkpoint.save_on_signal in zeroweave's config: such a checkpoint would lack what {library} "
            f"keeps, such as schedulers; save with {library} where the program catches the signal"
        )
    return config


def autocasting(config: Config, precision: str, dtypes: Mapping[str, str]) -> Config:
    """`config` with the autocast that a library's `precision` means in `dtypes`, if it means one there.

    ConfigError where the config says something about that as well.
    """
    if (dtype := dtypes.get(precision)) is None:
        return config
    own = config.precision
    if both := [name for name in ("params", "autocast") if getattr(own, name) is not None]:
        raise ConfigError(
            f"[ZW804] precision.{both[0]} in zeroweave's config beside precision {precision!r}: say one of them"
        )
    return config.model_copy(update={"precision": own.model_copy(update={"autocast": dtype})})


def refuse_other_device(device: torch.device) -> None:
    """UnsupportedError unless engines of this process, which has its process group, compute on `device`."""
    where = device_of(dist.group.WORLD if dist.is_initialized() else None)
    if where.type != device.type or (where.type == "cuda" and where != torch.device(device.type, device.index or 0)):
        raise UnsupportedError(
            f"[ZW107] the device is {device}, and zeroweave would compute on {where}: choose GPUs, or none, by "
            "CUDA_VISIBLE_DEVICES, so that each rank's is that of its LOCAL_RANK"
        )


def clip(engine: Engine, given: Iterable[torch.Tensor] | None, max_norm: float, norm_type: float) -> torch.Tensor:
    """`Engine.clip_grad_norm_` of `given` parameters, None: of all. UnsupportedError for some, and for other norms."""
    if norm_type != 2:
        raise UnsupportedError(f"clipping by the norm of type {norm_type}: the engine has the 2-norm only")
    if given is not None:
        found = _trained(given)
        groups = [] if engine.optimizer is None else engine.optimizer.param_groups
        grouped = (parameter for group in groups for parameter in group["params"])
        if found not in (_trained(engine.module.parameters()), _trained(grouped)):
            raise UnsupportedError(
                f"clipping {len(found)} parameters, which are not all of the model's: the engine clips by the norm of "
                "all; pass model.parameters()"
            )
    return engine.clip_grad_norm_(max_norm)


def _trained(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters if parameter.requires_grad}
