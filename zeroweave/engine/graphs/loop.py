"""The calls of a training loop, as they run where no graph stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zeroweave.engine.calls import Calls, arguments_of, loss_of
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window

LossFunction = Callable[[Any, Any], torch.Tensor]


class Loop:
    """Forward, backward and step of one engine; the methods are those of `Engine`, which tells more of them."""

    def __init__(self, parts: EngineParts, calls: Calls, window: Window, step: OptimizerStep) -> None:
        self._model, self._guard = parts.model, parts.guard
        self._calls, self._window, self._step = calls, window, step

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._guard("forward"):
            return self._calls.run(self._model, args, self._calls.without_cache(dict(kwargs)))

    def loss(self, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        args, kwargs = arguments_of(batch)
        output = self.forward(args, kwargs)
        with self._guard("loss_fn"):
            return loss_of(output, batch, loss_fn)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        with self._guard("backward"):
            self._window.backward(self._window.scale(loss, by_steps=scale_wrt_gas), retain_graph)

    def step(self) -> bool:
        """Was it a boundary?"""
        with self._guard("step"):
            boundary = self._window.ends()
            self._step.take(boundary)
            self._window.micro_step_ended(boundary)
        return boundary

    def train_step(self, batch: Any, loss_fn: LossFunction | None) -> tuple[torch.Tensor, bool]:
        """The detached, unscaled loss; and was it a boundary?"""
        loss = self.loss(batch, loss_fn)
        self.backward(loss)
        return loss.detach(), self.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._guard("no_sync"):
            self._window.refuse_coalescing("no_sync()")
        with self._window.deferring("no_sync"):
            yield

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """The block of `coalesce_grad_reduction`; `reduce` comes behind it."""
        with self._guard("coalesce_grad_reduction"):
            self._window.refuse_block()
        with self._window.deferring("coalesce_grad_reduction"), self._guard.around("coalesce_grad_reduction"):
            yield

    def reduce(self) -> None:
        with self._guard("the end of coalesce_grad_reduction"):
            self._window.reduce()
