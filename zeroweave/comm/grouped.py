"""One transport for several sharding groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import ACROSS, INSIDE, WORLD, BucketLayout


class Grouped(Around):
    """Hands each collective to the transport of its layout's sharding group, in the order in which they are asked for.

    `transports`: by the group's name; that of "world" has all ranks, and all collectives without a group. A
    replicated flat is gathered across replicas first, then inside. The caller issues its reductions one by one, and
    adds up between them.
    """

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        super().__init__(transports[WORLD])
        self._transports = transports

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        if layout.replicas == 1:
            return self._transports[layout.group].all_gather(flat, shard, layout)
        near = torch.empty(layout.across.numel, dtype=flat.dtype, device=flat.device)
        self._transports[ACROSS].all_gather(near, shard, layout.across).wait()
        return self._transports[INSIDE].all_gather(flat, near, layout.inside)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._transports[layout.group].reduce_scatter(out, parts, layout, op)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._transports[layout.group].all_reduce(out, parts, layout, op)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._transports[group].broadcast(tensor, source)
