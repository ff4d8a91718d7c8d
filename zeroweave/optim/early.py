"""Updates beside a backward: of buckets whose gradients are there, in a window that nothing can stop any more.

An update reads and writes memory, and the backward of the blocks before computes. So an update takes part of its time
for nothing, and the gradient's memory is free for the reductions behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from zeroweave.comm.pending import Beside, Side, beside
from zeroweave.optim.scaler import Scaled
from zeroweave.schedule import Instruction, Schedule, Settle, early_updates

Take = Callable[[int], Scaled | None]
Update = Callable[[Sequence[int]], object]

_AT_ONCE: Final = 2
"""Updates under way at most; their gradients are alive, although no account has them."""


class EarlyUpdates:
    """Those of one window, which follows `schedule` and has `executed` these of it.

    `begin(take)` gives what updates buckets by their gradients, each of which `take(bucket)` gives. `side`: where they
    run; None: where all runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        executed: Iterable[Instruction],
        begin: Callable[[Take], Update],
        take: Take,
        side: Side | None,
    ) -> None:
        self._settles = Counter(i.bucket for i in schedule.instructions if isinstance(i, Settle))
        """those to come, by bucket"""
        self._settles.subtract(i.bucket for i in executed if isinstance(i, Settle))
        self._may = early_updates(schedule)
        self._begin, self._take, self._side = begin, take, side
        self._update: Update | None = None
        self._gradients: list[torch.Tensor] = []
        """of the update that is being issued"""
        self._under_way: deque[Beside] = deque()
        self._done: set[int] = set()
        self._over = False

    def settled(self, bucket: int) -> Update | None:
        """A reduction of the bucket has settled. What updates it now; None: it is not updated yet."""
        self._settles[bucket] -= 1
        due = not self._over and bucket in self._may and not self._settles[bucket]
        return self._beside if due else None

    def _beside(self, buckets: Sequence[int]) -> None:
        """Updates buckets, behind what the device was given so far, and beside what it is given next."""
        update = self.update  # what all updates have in common is computed in front of the first one
        if len(self._under_way) == _AT_ONCE:
            self._under_way.popleft().wait()
        with beside(self._side):
            update(buckets)
        self._under_way.append(Beside() if self._side is None else self._side.pending(*self._gradients))
        self._gradients.clear()
        self._done.update(buckets)

    @property
    def update(self) -> Update:
        """What updates buckets in this window."""
        if self._update is None:
            self._update = self._begin(self._taken)
        return self._update

    def _taken(self, bucket: int) -> Scaled | None:
        gradient = self._take(bucket)
        if gradient is not None and not self._over:
            self._gradients.append(gradient.values)
        return gradient

    def end(self) -> frozenset[int]:
        """No more of them; what comes next sees what they have written. The buckets that were updated."""
        self._over = True
        while self._under_way:
            self._under_way.popleft().wait()
        return frozenset(self._done)
