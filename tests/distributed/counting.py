"""Collectives counted by PyTorch's profiler, which knows nothing of zeroweave's ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

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
