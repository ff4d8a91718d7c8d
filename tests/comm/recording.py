"""A transport that moves nothing and remembers what it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zeroweave.comm.transport import Messages, Parts, ReduceOp, Spread
from zeroweave.layout import BucketLayout, Slot


def layout(world: int, numel: int) -> BucketLayout:
    """One bucket of one float32 parameter [numel]."""
    return BucketLayout(
        id=0,
        name="bucket",
        dtype="float32",
        itemsize=4,
        requires_grad=True,
        group="world",
        world=world,
        slots=(Slot("parameter", 0, numel, (numel,)),),
        numel=numel,
    )


class RecordedPending:
    """Notes in `calls` that it was waited for."""

    def __init__(self, kind: str, calls: list[tuple[str, str]]) -> None:
        self._kind, self._calls = kind, calls

    def wait(self) -> None:
        self._calls.append((self._kind, "wait"))


class RecordingTransport:
    """`calls`: (kind, "issue" or "wait"), in order."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.calls: list[tuple[str, str]] = []

    def _issue(self, kind: str) -> RecordedPending:
        self.calls.append((kind, "issue"))
        return RecordedPending(kind, self.calls)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> RecordedPending:
        return self._issue("all_gather")

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> RecordedPending:
        return self._issue("reduce_scatter")

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> RecordedPending:
        return self._issue("all_reduce")

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> RecordedPending:
        return self._issue("all_to_all")

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = "world") -> None:
        self._issue("broadcast")

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._issue("all_reduce_sum")


class Noting(RecordingTransport):
    """Notes its name, and what it is asked for, in a list that it shares with others."""

    def __init__(self, name: str, noted: list[str], world: int = 2) -> None:
        super().__init__(rank=0, world=world)
        self._name, self._noted = name, noted

    @contextmanager
    def together(self) -> Iterator[None]:
        self._noted.append("(")
        yield
        self._noted.append(")")

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> RecordedPending:
        self._noted.append(self._name)
        return super().all_gather(flat, shard, layout)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> RecordedPending:
        self._noted.append(f"{self._name} reduces")
        return super().reduce_scatter(out, parts, layout, op)
