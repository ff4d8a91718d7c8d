"""Forwards without gradients: a replay whose windows are single forwards."""

from __future__ import annotations

from collections.abc import Mapping

from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.replay import Replay
from zeroweave.runtime.timeline import Record
from zeroweave.schedule import BucketFacts, Event, Facts, compile_schedule


class Inference(Replay):
    """Gathers for forwards in `no_grad`; one that equals the forward before it follows a schedule from then on.

    No agreement is needed for that: gathers are all it issues, and their order is that of the calls.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        gradients: Gradients,
        kept_by_stage: frozenset[int],
        optional: frozenset[int],
    ) -> None:
        super().__init__(buckets, gradients, kept_by_stage, Record(), optional=optional)
        layouts = [bucket.layout for bucket in buckets.values()]
        self._facts = Facts(
            tuple(BucketFacts(b.id, b.name, b.nbytes, trainable=False) for b in layouts),
            kept_by_stage=frozenset(),
            depth=1,
            prefetch=1,
            update_by_bucket=False,
        )
        self._before: tuple[Event, ...] = ()

    @property
    def _catches_up(self) -> bool:
        return False  # the ranks have not agreed on these schedules

    def forward_over(self) -> None:
        """The outermost forward is over; the next one may follow what it did."""
        if self.kept_by_stage:
            self.clear()  # kept buckets stay gathered, there is nothing to order
            return
        record = tuple(self.record)
        if self.arrive():
            schedule = self.schedule
        else:
            schedule = compile_schedule(record, self._facts) if record == self._before else None
        self._before = record
        self.next_window(schedule)

    def abort(self) -> None:
        """The forward ended with an exception, or the window was aborted."""
        super().abort()
        self.next_window(None)
