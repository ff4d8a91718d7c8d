"""Writes to gathered parameters that leave no trace: through `.data`, or by kernels that PyTorch cannot look into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

from zeroweave.errors import ParameterError
from zeroweave.runtime.bucket import Bucket, write_error

WATCHED: Final = 5
"""So many windows are watched: a write may change nothing at first, as that of a momentum encoder that is a copy."""


class Writes:
    """Compares flats after a forward with what was gathered, in the first forward of each of the first windows.

    Each rank compares its own part of a flat, on the device, and reads the results at the forward's end. So a write to
    another rank's part is found by that rank, if the program writes the same there. None is watched before `watch`.
    """

    def __init__(self, buckets: Iterable[Bucket], busy: Callable[[], bool]) -> None:
        """`busy()`: a forward or backward is under way."""
        self._busy = busy
        self._doubts: list[tuple[str, torch.Tensor]] = []
        # If the flat is the shard, no gather follows, and no write is lost.
        self._buckets = [bucket for bucket in buckets if bucket.layout.shard_numel and not bucket.is_shard]
        self._left: int | None = None
        self._found: list[tuple[Bucket, torch.Tensor]] | None = None

    def watch(self) -> None:
        """The buckets have values: the next windows are watched."""
        self._left = WATCHED

    def begin(self, fresh: bool) -> None:
        """A window's first forward begins. `fresh`: True if it has come to a new kernel that may write."""
        if fresh and self._left is not None:
            self._left = WATCHED
        if self._left and self._found is None:
            self._left, self._found = self._left - 1, []

    def look(self, buckets: Iterable[Bucket]) -> None:
        """These are held now, and may be dropped afterwards."""
        if self._found is not None:
            self._found += [(bucket, bucket.altered()) for bucket in buckets if bucket in self._buckets]

    def end(self, failed: bool = False) -> None:
        """The forward is over. ParameterError if it has written, unless it has failed."""
        self.look(bucket for bucket in self._buckets if (bucket.holds or bucket.standing) and not failed)
        found, self._found = self._found, None
        if failed:
            return self.forget()
        self.settle()
        if not found:
            return
        results = zip(found, torch.stack([result for _, result in found]).tolist(), strict=True)
        written = [(bucket.layout.slots, offset) for (bucket, _), (differs, offset) in results if differs]
        if names := {[slot.name for slot in slots if slot.offset <= offset][-1] for slots, offset in written}:
            for bucket, _ in found:
                bucket.accept_writes()  # this error reports them
            raise ParameterError(
                f"[ZW204] the forward writes to {', '.join(map(repr, sorted(names)))}, through `.data` or in a kernel: "
                "the write would be lost with the next gather. Write parameters between steps, inside "
                "`with engine.full_parameters():`, or use buffers; docs/ema.md has momentum encoders"
            )

    def doubt(self, names: str, altered: torch.Tensor) -> bool:
        """See `Bucket`. One read at the end of the forward or backward is cheaper than one for each bucket."""
        if taken := self._busy():
            self._doubts.append((names, altered))
        return taken

    def settle(self) -> None:
        """The forward or backward is over. ParameterError if operators that may write did so."""
        doubts, self._doubts = self._doubts, []
        if not doubts:
            return
        results = torch.stack([altered for _, altered in doubts]).tolist()
        if written := [names for (names, _), (differs, _) in zip(doubts, results, strict=True) if differs]:
            raise ParameterError(write_error(", ".join(dict.fromkeys(written))))

    def forget(self) -> None:
        """Forgets doubts: the forward or backward has failed."""
        self._doubts = []
