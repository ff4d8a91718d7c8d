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
from zeroweave.integrations.accelerate_settings import AUTOCASTS
from zeroweave.integrations.wrapped import ZeroweaveModel, autocasting, clip, refuse_other_device

_WORLDS: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class TrainerModel(ZeroweaveModel):
    """The model as its forward's callers see it: calls go through the engine, all else to the user's module."""

    def __init__(self, engine: Engine) -> None:
        # As accelerate has it: what follows the model, such as a loss or metrics, is computed in float32.
        super().__init__(engine, convert_to_fp32 if engine.config.precision.autocast else None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class ZeroweaveOptimizer(AcceleratedOptimizer):
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


class TrainerAccelerator(accelerate.Accelerator):
    """accelerate's, with an engine in the place of DistributedDataParallel, autocast and the GradScaler.

    The micro-step that ends a window is the one for which accelerate's `sync_gradients` is set. ConfigError for a
    launcher's settings that contradict zeroweave.
    """

    def __init__(self, config: Config, dataloader_config: DataLoaderConfiguration) -> None:
        super().__init__(dataloader_config=dataloader_config)
        if self.distributed_type not in _WORLDS:
            raise ConfigError(
                f"zeroweave under accelerate's {self.distributed_type.value}, which distributes by itself: start the "
                "program with `zeroweave run` or torchrun"
            )
        refuse_other_device(self.device)
        self.scaler = None  # the engine scales losses
        self.wrapper: TrainerModel | None = None
        """the model of the engine, where there is one"""
        self._config = _of_trainer(config, self.mixed_precision)

    @property
    def engine(self) -> Engine:
        """EngineError where there is none."""
        if self.wrapper is None:
            raise EngineError("there is no engine yet: train(), evaluate() and predict() make it")
        return self.wrapper.engine

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainerModel:
        """The engine's model. Makes the engine where there is none; without an optimizer it evaluates only.

        EngineError for another model than the engine's.
        """
        if self.wrapper is None:
            self.wrapper = TrainerModel(initialize(model, optimizer, self._config))
        if self.wrapper.module is not model:
            raise EngineError("the Trainer's model is another one than its engine's: make a Trainer for each model")
        return self.wrapper

    def end_engine(self) -> None:
        """Gives the model back as an ordinary one. Collective."""
        self.engine.destroy(optimizer_state=False)
        self.wrapper = None

    # ------------------------------------------------------------------ accelerate's methods
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer that steps through the engine."""
        if not isinstance(optimizer, ZeroweaveOptimizer):
            optimizer = ZeroweaveOptimizer(self.engine)
        self._optimizers.append(optimizer)
        return optimizer

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super().unwrap_model(model.module if isinstance(model, TrainerModel) else model, *args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward of `loss`, which the Trainer has divided; `kwargs` are those of `Engine.backward`."""
        self.engine.set_gradient_accumulation_boundary(self.sync_gradients)
        self.engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)
        if not self.sync_gradients:
            self.engine.step()  # ends the micro-step; at the boundary the optimizer's step does

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """UnsupportedError for a part of the model's parameters, and for other norms than the 2-norm."""
        return clip(self.engine, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """UnsupportedError: gradients are sharded."""
        raise UnsupportedError("clip_grad_value_(): gradients are sharded over the ranks; use max_grad_norm=")


def _of_trainer(config: Config, mixed_precision: str) -> Config:
    """`config` with the mixed precision that accelerate was asked for, and with one checkpoint in a folder."""
    if mixed_precision not in ("no", *AUTOCASTS):
        raise ConfigError(f"mixed precision {mixed_precision!r} with zeroweave: use bf16=True or fp16=True")
    config = autocasting(config, mixed_precision, AUTOCASTS)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 1})})
