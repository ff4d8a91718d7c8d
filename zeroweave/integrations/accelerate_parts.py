"""What Accelerate has around a model and its optimizer, for its own scripts and for transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32

from zeroweave.engine import Engine
from zeroweave.errors import UnsupportedError
from zeroweave.integrations.wrapped import ZeroweaveModel, drop


class AcceleratedModel(ZeroweaveModel):
    """Where its engine autocasts, narrower floating outputs become float32, as Accelerate has it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, convert_to_fp32 if engine.config.precision.autocast else None)
        self._is_accelerate_prepared = True  # Accelerate lists it, and prepares it no further


class ZeroweaveOptimizer(AcceleratedOptimizer):
    """The user's optimizer, whose `step` is the engine's. It is to be called by all ranks, as everything here."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self._is_accelerate_prepared = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Ends a micro-step; where Accelerate syncs gradients, the optimizer step."""
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure): the engine steps without one; call it without")
        ends = self.gradient_state.sync_gradients
        self._engine.set_gradient_accumulation_boundary(ends)
        self._engine.step()
        self._engine.set_gradient_accumulation_boundary(None)
        if ends:
            self._is_overflow = not self._engine.was_step_applied()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops gradients that wait, where Accelerate syncs gradients. After a step there are none."""
        if self.gradient_state.sync_gradients:
            drop(self._engine, self.optimizer.zero_grad)
