"""The accelerator of a Trainer: accelerate's, with an engine."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from zeroweave.config import Config
from zeroweave.engine import Engine
from zeroweave.errors import EngineError
from zeroweave.integrations.accelerate import AcceleratedModel, ZeroweaveAccelerator


class TrainerAccelerator(ZeroweaveAccelerator):
    """The engine is made when the Trainer first runs its model, with an optimizer or for evaluation alone."""

    def __init__(self, config: Config, dataloader_config: DataLoaderConfiguration) -> None:
        one = config.checkpoint.model_copy(update={"keep_last": 1})  # the Trainer has a folder for each
        super().__init__(
            zeroweave_config=config.model_copy(update={"checkpoint": one}), dataloader_config=dataloader_config
        )
        self.wrapper: AcceleratedModel | None = None
        """the model of the engine, where there is one; also when `free_memory` has forgotten it"""

    @property
    def engine(self) -> Engine:
        """EngineError where there is none."""
        if self.wrapper is None:
            raise EngineError("[ZW802] there is no engine yet: train(), evaluate() and predict() make it")
        return self.wrapper.engine

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[AcceleratedModel, Any]:
        """The engine's model and optimizer; makes the engine where there is none, without an optimizer for evaluation.

        EngineError for another model than the engine's.
        """
        if self.wrapper is None:
            made = (model, optimizer) if optimizer is None else self.prepare(model, optimizer)
            self.wrapper, optimizer = self.prepare_model(made[0]), made[1]
        if self.wrapper.module is not model:
            raise EngineError(
                "[ZW802] the Trainer's model is another one than its engine's: make a Trainer for each model"
            )
        return self.wrapper, optimizer

    def end_engine(self) -> None:
        """Gives the model back as an ordinary one. Collective."""
        self.engine.destroy(optimizer_state=False)
        self._models = [model for model in self._models if model is not self.wrapper]
        self.wrapper = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward of `loss`, which the Trainer has divided. Collective."""
        self.engine.set_gradient_accumulation_boundary(self.sync_gradients)
        super().backward(loss, **kwargs)
        if not self.sync_gradients:
            self.engine.step()  # ends the micro-step; at the boundary the optimizer's step does
