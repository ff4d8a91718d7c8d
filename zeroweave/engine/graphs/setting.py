"""What a tried window found, which replays will not find otherwise: options, buffers, and what is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from zeroweave.engine.graphs.attributes import Attributes
from zeroweave.engine.graphs.held import Held, captured_by, held_by
from zeroweave.engine.parts import EngineParts

_CHANGING: Final = ("params", "lr", "initial_lr")
"""What of an optimizer's group no graph takes for constant: parameters have their places, rates lie on the device."""


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What graphs take for constant of each of its groups."""
    return [{key: value for key, value in group.items() if key not in _CHANGING} for group in optimizer.param_groups]


class Setting:
    """Made in front of the window; `look` is called before each of its calls."""

    def __init__(self, parts: EngineParts) -> None:
        assert parts.optimizer is not None
        self._model, self._optimizer = parts.model, parts.optimizer.optimizer
        self._options = options_of(self._optimizer)
        self._buffers = dict(parts.model.named_buffers())
        self._held: list[Held] = list(held_by(parts.model))
        self.attributes = Attributes()
        self.attributes.look([self._model])
        self._assigned: str | None = None

    def look(self, loss_fn: Any) -> None:
        """A call is about to be made."""
        self._assigned = self.assigned
        self._options = options_of(self._optimizer)
        if loss_fn is not None:
            self._held += captured_by(loss_fn, self._model.modules())
            self.attributes.look([loss_fn])

    @property
    def assigned(self) -> str | None:
        """The name of a number that was set within the window: a graph would have one value in all calls."""
        return self._assigned or self.attributes.changed

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the optimizer has the options of the window's step: a scheduler may have changed them behind it."""
        now = options_of(self._optimizer)
        self._set(self._options)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, options, strict=True):
            group.update(values)

    @property
    def replaced(self) -> str | None:
        """The name of a tensor that the window has put another one in the place of. No replay would, nor read it."""
        there = dict(self._model.named_buffers())
        if found := next((name for name, buffer in self._buffers.items() if there.get(name) is not buffer), None):
            return f"buffer {found}"
        return next((held.name for held in self._held if not held.is_there), None)

    @property
    def leads_back(self) -> str | None:
        """The name of a tensor at hand from which a backward would come into the model, beside what that returns."""
        return next((held.name for held in held_by(self._model) if held.tensor.grad_fn is not None), None)
