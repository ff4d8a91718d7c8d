"""What a Trainer does with its model and optimizer through accelerate, done by an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DataLoaderConfiguration, DistributedType, convert_to_fp32
from torch import nn

from zeroweave.config import Config
from zeroweave.engine import Engine
from zeroweave.engine.assembly import initialize
from zeroweave.errors import ConfigError, EngineError, UnsupportedError

_WORLDS: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_AUTOCAST: Final = {"no": None, "fp16": "float16", "bf16": "bfloat16"}
"""accelerate's mixed precision, and the dtype of the autocast that it is."""


class EngineModule(nn.Module):
    """The model as its forward's callers see it: calls go through the engine, all else to the user's module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.module = engine, engine.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.engine(*args, **kwargs)
        # As accelerate does: what is computed behind the model, such as a loss or metrics, is computed in float32.
        return output if self.engine.config.precision.autocast is None else convert_to_fp32(output)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """The user's optimizer, whose steps are the engine's. Its `state_dict` and `load_state_dict` are collective."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self) -> None:
        if self.gradient_state.sync_gradients:
            self._engine.step()

    @property
    def step_was_skipped(self) -> bool:
        return not self._engine.was_step_applied()


class EngineAccelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]
    """accelerate's, with an engine in the place of DistributedDataParallel, autocast and the GradScaler.

    Which micro-step ends a window is what accelerate has as `sync_gradients`.
    """

    def __init__(self, config: Config, dataloader_config: DataLoaderConfiguration) -> None:
        super().__init__(dataloader_config=dataloader_config)
        if self.distributed_type not in _WORLDS:
            raise ConfigError(
                f"zeroweave under {self.distributed_type.value}, which shards or distributes by itself: start the "
                "program with `zeroweave run`, torchrun, or accelerate's own configuration for several GPUs"
            )
        self.scaler = None  # the engine scales losses
        self.wrapper: EngineModule | None = None
        """the model of the engine that there is"""
        self._config = _with_precision(config, self.mixed_precision)

    @property
    def engine(self) -> Engine | None:
        return None if self.wrapper is None else self.wrapper.engine

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> EngineModule:
        """The engine's model; the engine is made where there is none, and is for evaluation without an optimizer."""
        if self.wrapper is None:
            self.wrapper = EngineModule(initialize(model, optimizer, self._config))
        return self.wrapper

    def end_engine(self) -> None:
        """Gives the model back as an ordinary one. Collective."""
        if self.wrapper is not None:
            self.wrapper.engine.destroy(optimizer_state=False)
            self.wrapper = None

    # ------------------------------------------------------------------ accelerate's methods
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer that steps through the engine."""
        if not isinstance(optimizer, EngineOptimizer):
            optimizer = EngineOptimizer(self._started("prepare_optimizer()"))
        self._optimizers.append(optimizer)
        return optimizer

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super().unwrap_model(model.module if isinstance(model, EngineModule) else model, *args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        engine = self._started("backward()")
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)
        if not self.sync_gradients:
            engine.step()  # ends the micro-step; at the boundary the optimizer's step does

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        engine = self._started("clip_grad_norm_()")
        given = {id(parameter) for parameter in parameters}
        named = engine.module.named_parameters()
        if left := [name for name, parameter in named if parameter.requires_grad and id(parameter) not in given]:
            raise UnsupportedError(f"clip_grad_norm_() without {left[0]!r}: zeroweave clips by the norm of all gradients")
        if norm_type != 2:
            raise UnsupportedError(f"clip_grad_norm_() with norm_type={norm_type}: zeroweave clips by the 2-norm")
        return engine.clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        raise UnsupportedError("clip_grad_value_(): zeroweave clips by the global norm, with max_grad_norm=")

    def _started(self, what: str) -> Engine:
        if self.engine is None:
            raise EngineError(f"{what} before the engine is there: train() and evaluate() make it")
        return self.engine


def _with_precision(config: Config, mixed_precision: str) -> Config:
    """`config` with the mixed precision that accelerate was asked for, and with one checkpoint in a folder."""
    if mixed_precision not in _AUTOCAST:
        raise ConfigError(f"mixed precision {mixed_precision!r} with zeroweave: use bf16=True or fp16=True")
    autocast, precision = _AUTOCAST[mixed_precision], config.precision
    if autocast is not None and precision.autocast not in (None, autocast):
        raise ConfigError(
            f"mixed precision {mixed_precision!r} with zeroweave's precision.autocast {precision.autocast!r}: give one"
        )
    return config.model_copy(
        update={
            "precision": precision.model_copy(update={"autocast": autocast or precision.autocast}),
            "checkpoint": config.checkpoint.model_copy(update={"keep_last": 1}),
        }
    )
