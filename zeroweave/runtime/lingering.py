"""Buckets that some tensor still views when their last hold is dropped: freed later, refused at the step."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from zeroweave.errors import ParameterError
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

    def refuse_views(self) -> None:
        """Raises if a view of a gathered parameter is still alive: it would keep the values of this step."""
        self.sweep()
        if any(b.viewed for b in self._buckets.values()):
            gc.collect()  # a view in a cycle of garbage is nobody's
        if names := [b.layout.name for b in self._buckets.values() if b.viewed]:
            raise ParameterError(
                f"a view of a parameter of {', '.join(map(repr, names))} is alive at the step and would keep old "
                "values; keep a `.clone()` of it instead, or delete it before engine.step()"
            )
