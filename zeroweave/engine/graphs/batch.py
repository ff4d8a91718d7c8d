"""What a micro-step is given: the tensors that a graph reads, and all that decides which graph it is."""

from __future__ import annotations

from typing import Any

import torch

from zeroweave.engine.graphs.nest import Nest, Uncapturable, copy, room_for


class Batch(Nest):
    """One batch, and how it is to be computed with.

    `signature` is equal for batches that one graph can serve: nested alike, with tensors of equal shapes, strides and
    dtypes, and equal other values. Uncapturable for what no graph can read.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        super().__init__(batch, "a batch holds")
        for tensor in self.tensors:
            _check(tensor, device)
        self.signature = self.form, tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)

    def copies(self) -> list[torch.Tensor]:
        """New tensors with the contents of `tensors`, in the same shapes and strides."""
        made = room_for(self.tensors)
        copy(made, self.tensors)
        return made


def _check(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise Uncapturable(f"a batch holds a tensor on {tensor.device}: move batches to {device} before the call")
    if tensor.requires_grad:
        raise Uncapturable("a batch holds a tensor that requires grad")
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Uncapturable(f"a batch holds a {type(tensor).__name__} of layout {tensor.layout}")
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise Uncapturable("a batch holds an expanded tensor, whose elements share memory: make it contiguous")
