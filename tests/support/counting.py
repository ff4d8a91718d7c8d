"""Collectives counted by PyTorch's profiler, which knows nothing of zeroweave's ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}
"""PyTorch's names of the collectives; host-side control messages use other operators (lists of tensors)."""


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Yields a list that receives (kind, elements of the full tensor) of each collective, in order of issue."""
    found: list[tuple[str, int]] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        yield found
    events = sorted((event for event in run.events() if event.name in KINDS), key=lambda event: event.time_range.start)
    for event in events:
        sizes = [shape[0] for shape in event.input_shapes if len(shape) == 1]
        found.append((KINDS[event.name], max(sizes, default=0)))


@contextmanager
def silent() -> Iterator[None]:
    """Nothing that PyTorch's profiler knows as communication happens inside."""
    with profile(activities=[ProfilerActivity.CPU]) as run:
        yield
    told = {event.name for event in run.events() or () if event.name.startswith(("c10d", "gloo", "nccl"))}
    assert not told, told


DISPATCHED = {**KINDS, "c10d::reduce_scatter_": "reduce_scatter"}


class Dispatched(TorchDispatchMode):
    """Collectives as PyTorch's dispatcher sees them; unlike the profiler it knows the sizes of lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        """(kind, elements of the full tensor) in order of issue"""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kind := DISPATCHED.get(function.name())) is not None:
            self.found.append((kind, max(_elements(argument) for argument in args)))
        return function(*args, **(kwargs or {}))


def _elements(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel()
    return sum(map(_elements, argument)) if isinstance(argument, list | tuple) else 0
