"""Buckets that some tensor still views when their last hold is dropped: freed later, and rewritten with new values.

How many users a storage has decides when memory is freed, and whether a gather is worth its while; never whether a
program may go on. The last reference may go with a garbage collection, or when another thread looks.
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroweave.runtime.bucket import Bucket


class Lingering:
    """Which of these buckets linger."""

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self._buckets = buckets
        self._lingering: set[int] = set()

    def reshard(self, bucket: int) -> None:
        """Drops a hold of the bucket."""
        if not self._buckets[bucket].reshard():
            self._lingering.add(bucket)

    def sweep(self) -> None:
        """Frees what nobody views any more."""
        if not self._lingering:
            return
        for bucket in sorted(self._lingering):
            if self._buckets[bucket].holds or self._buckets[bucket].free():
                self._lingering.discard(bucket)

    def viewed(self) -> bytes:
        """A byte per bucket, by id: 1 where some tensor of this rank still views its flat."""
        self.sweep()
        return bytes(bucket.viewed for _, bucket in sorted(self._buckets.items()))

    def rewrite(self, viewed: bytes) -> None:
        """Gathers the buckets marked in `viewed`, which all ranks have agreed on, whose shards have new values.

        A view that user code keeps shows them then, as one of an ordinary parameter does.
        """
        for (bucket, each), marked in zip(sorted(self._buckets.items()), viewed, strict=True):
            if marked:
                each.unshard()
                each.wait()
                self.reshard(bucket)
