"""What a micro-step is given: the tensors that a graph reads, and all that decides which graph it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from zeroweave._torch.fx import flatten, unflatten

CONSTANTS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Uncapturable(Exception):
    """Why a step cannot be a graph."""


class Batch:
    """One batch, and how it is to be computed with.

    `signature` is equal for batches that one graph can serve: nested alike, with tensors of equal shapes, strides and
    dtypes, and equal other values. Uncapturable for what no graph can read.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, self._structure = flatten(batch)
        self.tensors: list[torch.Tensor] = []
        """each once"""
        self._leaves: list[Any] = []
        """an index of `tensors`, or a constant in a tuple"""
        seen: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in seen:
                    _check(leaf, device)
                    seen[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self._leaves.append(seen[id(leaf)])
            elif isinstance(leaf, CONSTANTS):
                self._leaves.append((leaf,))
            else:
                raise Uncapturable(f"a batch holds a {type(leaf).__name__}, which no graph can read")
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)
        self.signature = repr(self._structure), repr(self._leaves), shapes

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A batch like this one, of other tensors."""
        leaves = [tensors[leaf] if isinstance(leaf, int) else leaf[0] for leaf in self._leaves]
        return unflatten(leaves, self._structure)

    def copies(self) -> list[torch.Tensor]:
        """New tensors with the contents of `tensors`, in the same shapes and strides."""
        made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self.tensors]
        copy(made, self.tensors)
        return made


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """The current stream copies `sources` into `targets`."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _check(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise Uncapturable(f"a batch holds a tensor on {tensor.device}: move batches to {device} before the call")
    if tensor.requires_grad:
        raise Uncapturable("a batch holds a tensor that requires grad")
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Uncapturable(f"a batch holds a {type(tensor).__name__} of layout {tensor.layout}")
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise Uncapturable("a batch holds an expanded tensor, whose elements share memory: make it contiguous")


class Modes:
    """Which modules train, and how the program casts by itself: what a forward runs under."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._modules, self._kind = modules, device.type
        self._training = [module.training for module in modules]
        self._casts = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside they are what they were."""
        now = [module.training for module in self._modules]
        self._set(self._training)
        enabled, dtype = self._casts
        try:
            with torch.autocast(self._kind, dtype, enabled):
                yield
        finally:
            self._set(now)

    def _set(self, training: Sequence[bool]) -> None:
        for module, trains in zip(self._modules, training, strict=True):
            module.training = trains


def surroundings(
    modules: Iterable[torch.nn.Module], device: torch.device, loss_fn: Callable[..., Any] | None
) -> tuple[Any, ...]:
    """What else decides what a step computes, as far as it can be seen from outside."""
    return (
        hash(tuple(module.training for module in modules)),
        id(loss_fn),
        torch.is_autocast_enabled(device.type),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
