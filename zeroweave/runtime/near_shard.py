"""The part of a replicated bucket that its near ranks gather from.

source [numel / world]  -- across replicas, once a change -->  near shard [numel / group]  -- inside -->  flat [numel]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroweave.comm.transport import Gatherer, Pending, Transport
from zeroweave.layout import BucketLayout


class NearShard:
    """The near shard of a bucket, in `dtype` on the device. Costs numel / group elements for good.

    `source()`: this rank's shard, which `gatherer` gathers across replicas.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        transport: Transport,
        gatherer: Gatherer,
        source: Callable[[], torch.Tensor],
    ) -> None:
        self._layout, self._transport, self._gatherer, self._source = layout, transport, gatherer, source
        self.values = transport.empty(layout.across.numel, dtype)
        self._fresh = False
        """True if the values, or those of the gather that is under way, are those of the shards"""
        self._pending: Pending | None = None

    def start(self) -> None:
        """Starts the gather across replicas, unless the values are those of the shards. Collective."""
        if self._fresh:
            return
        self.wait()
        self._pending = self._gatherer.all_gather(self.values, self._source(), self._layout.across)
        self._fresh = True

    def wait(self) -> None:
        """Makes the values usable on the current stream. The shards may be written from here on."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()

    def expire(self) -> None:
        """The shards have changed."""
        self._fresh = False

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        """Fills the bucket's `flat` [numel]; see `Gatherer`. `shard` is the source."""
        self.start()
        self.wait()
        return self._transport.all_gather(flat, self.values, self._layout.inside)
