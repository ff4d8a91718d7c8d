"""The losses and tokens of the open window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Noted:
    """What the micro-steps of a window tell of themselves: losses, unscaled, and tokens. Waits for no device."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._tokens = 0

    def loss(self, loss: torch.Tensor, divisor: int) -> None:
        """One more, which is divided before it is differentiated; what it becomes later does not matter."""
        kind = torch.promote_types(loss.dtype, torch.float32)
        self._losses.append(loss.detach().mean(dtype=kind) / divisor)  # a copy: graphs write theirs again

    def batch(self, *batch: Any) -> None:
        """What the module is called with, to be trained with."""
        self._tokens += tokens_of(batch)

    def drop(self) -> None:
        """The window is given up."""
        self._losses.clear()
        self._tokens = 0

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The sum of the losses, 0-dim, None where there are none; and the tokens. At the end of the window.

        The sum is what the optimizer step's gradients are of.
        """
        losses, tokens = self._losses, self._tokens
        self._losses, self._tokens = [], 0
        return torch.stack(losses).sum() if losses else None, tokens


def tokens_of(batch: Any) -> int:
    """How many tokens a batch has: the elements of its `input_ids`, or else of its first two-dimensional integers.

    Padding counts. 0 where there is nothing of the kind.
    """
    first = 0
    for name, tensor in _tensors("", batch):
        if name == "input_ids":
            return tensor.numel()
        if not first and tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            first = tensor.numel()
    return first


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    match value:
        case torch.Tensor():
            yield name, value
        case Mapping():
            for key, item in value.items():
                yield from _tensors(str(key), item)
        case list() | tuple():
            for item in value:
                yield from _tensors(name, item)
