"""The common part of all wrappers around a transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import WORLD, BucketLayout


class Around:
    """A transport that hands all calls on to `inner`; a wrapper overrides what it changes.

    `_before` and `_after` surround every collective. `bucket`: its bucket's id, -1 for a tensor that is in none.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world = inner.rank, inner.world

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.empty(numel, dtype)

    def together(self) -> AbstractContextManager[None]:
        return self._inner.together()

    def _before(self, kind: str, bucket: int) -> None:
        """Called before a collective is issued."""

    def _after(self, kind: str, pending: Pending) -> Pending:
        """What the caller gets of an asynchronous collective that was issued."""
        return pending

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._before("all_gather", layout.id)
        return self._after("all_gather", self._inner.all_gather(flat, shard, layout))

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._before("reduce_scatter", layout.id)
        return self._after("reduce_scatter", self._inner.reduce_scatter(out, parts, layout, op))

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._before("all_reduce", layout.id)
        return self._after("all_reduce", self._inner.all_reduce(out, parts, layout, op))

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        self._before("all_to_all", messages.bucket)
        return self._after("all_to_all", self._inner.all_to_all(out, mine, messages))

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._before("broadcast", -1)
        self._inner.broadcast(tensor, source, group)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._before("all_reduce", -1)
        self._inner.all_reduce_sum(tensor)


class Routed(Around):
    """A wrapper whose collectives take several transports, of which some can share launches.

    In the scope of `together` there is one launch for each run of collectives of one transport, since a launch belongs
    to one communicator. Each gather and each reduce-scatter begins with `_launch`.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._scope: ExitStack | None = None
        self._launching: Transport | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        with ExitStack() as scope:
            self._scope, self._launching = scope, None
            try:
                yield
            finally:
                self._scope = None

    def _launch(self, transport: Transport | None) -> None:
        """The next collective belongs to a launch of this transport; None: to none."""
        if self._scope is None or transport is self._launching:
            return
        self._scope.close()
        self._launching = transport
        if transport is not None:
            self._scope.enter_context(transport.together())
