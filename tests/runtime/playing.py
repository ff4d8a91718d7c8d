"""Plays a record on the real replay, as a training program would, by a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tests.comm.virtual import VirtualTransport
from zeroweave.comm.wrappers import Wire
from zeroweave.layout import BucketLayout, Slot
from zeroweave.runtime.policy import Policy
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Costs, Entered, Event, Facts, Left, Micro, Ready, Schedule, Step
from zeroweave.schedule.instructions import ends

ITEM = 4


def layouts(facts: Facts) -> list[BucketLayout]:
    """One float32 parameter for each bucket, of the bucket's size; of two ranks, so that buckets are gathered."""
    return [
        BucketLayout(
            id=bucket.id,
            name=bucket.name,
            dtype="float32",
            itemsize=ITEM,
            requires_grad=bucket.trainable,
            group="world",
            world=2,
            slots=(Slot(f"{bucket.name}.weight", 0, bucket.nbytes // ITEM, (bucket.nbytes // ITEM,)),),
            numel=2 * -(-bucket.nbytes // (2 * ITEM)),
        )
        for bucket in facts.buckets
    ]


class Player:
    """A runtime of these buckets by a virtual clock. Calls, collectives and updates take what `costs` say."""

    def __init__(self, facts: Facts, costs: Costs) -> None:
        self.facts, self.costs = facts, costs
        self.transport = VirtualTransport(costs)
        self.clock = self.transport.clock
        self.wire = Wire(self.transport, torch.device("cpu"), self.clock)
        policy = Policy(
            kept_by_stage=facts.kept_by_stage,
            op="average",
            reduce_dtype=None,
            accumulate_dtype=torch.float32,
            free_threshold=0 if facts.free else None,
        )
        self.runtime = Runtime(layouts(facts), self.wire, policy)
        self.runtime.replay.limit_reductions(facts.depth)
        self.updated: list[int] = []

    def stand(self, schedule: Schedule) -> None:
        """What stays is there, as an earlier step of this schedule has left it; the clock begins anew."""
        self.runtime.next_window(schedule)
        for bucket in sorted(schedule.stays):
            self.runtime.buckets[bucket].unshard()
            self.runtime.replay.lingering.reshard(bucket)
        self.transport.calls.clear()
        self.clock.now = self.transport.free = 0.0

    def play(self, record: Iterable[Event], schedule: Schedule | None) -> Step | None:
        """One step that follows `schedule` (None: on demand); as it was timed, if it did."""
        runtime, replay = self.runtime, self.runtime.replay
        runtime.next_window(schedule)
        timeline = Timeline(self.clock)
        replay.executor.note_times(timeline)
        self.wire.time(timeline.collectives)
        seconds = iter(self.costs.compute)
        record = tuple(record)
        marked = ends(record)
        reduces = False
        for index, event in enumerate(record):
            match event:
                case Entered(call, uses):
                    replay.backward_began(call.phase == "backward")
                    replay.entered(call, uses)
                    self.clock.now += next(seconds, 0.0)
                case Left(call):
                    replay.left(call)
                    self.clock.now += next(seconds, 0.0) if index in marked else 0.0
                case Ready(bucket):
                    reduces = True
                    replay.backward_began(reduces)
                    self.deliver(bucket)
                    self.clock.now += next(seconds, 0.0)
                case Micro():
                    replay.backward_began(reduces)
                    replay.backward_ended(reduces)
                    runtime.gradients.end_backward()
                    reduces = False
        replay.finish(self._update, frozenset())
        followed = replay.following
        return timeline.step(schedule) if schedule is not None and followed else None

    def deliver(self, bucket: int) -> None:
        """The gradient of a bucket is complete, and nothing that uses it is to come."""
        real = self.runtime.buckets[bucket].real[0]
        self.runtime.gradients.announce([(bucket, 0)])
        if self.runtime.gradients.deliver([(bucket, 0)], [(bucket, 0, torch.zeros(real.shape))]):
            self.runtime.replay.reduce_due()
        self.runtime.replay.turn(bucket)

    def _update(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self.runtime.gradients.take(bucket)
            self.updated.append(bucket)
            self.clock.now += self.costs.update.get(bucket, 0.0)
