"""What instructions do: the one place from which a window gathers, frees, reduces, updates and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

from zeroweave._torch.modes import unseen
from zeroweave.runtime.activations import Offloading
from zeroweave.runtime.bucket import Bucket, Lingering
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.timeline import Timeline
from zeroweave.runtime.transfers import Snapshot
from zeroweave.schedule.instructions import (
    End,
    Free,
    GatherAcross,
    Instruction,
    Offload,
    Reduce,
    ReduceAcross,
    Release,
    Reload,
    Reshard,
    Run,
    Settle,
    Stage,
    Unshard,
    Update,
    Wait,
)


class Staging:
    """The snapshots that a checkpoint being saved needs of buckets before these change; empty most of the time."""

    def __init__(self) -> None:
        self._snapshots: Mapping[int, Snapshot] = {}

    @property
    def busy(self) -> bool:
        """True if a snapshot has to be told before buckets change."""
        return bool(self._snapshots)

    def begin(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Buckets change only after these snapshots have their values."""
        self._snapshots = snapshots

    def start(self, bucket: int) -> None:
        """The bucket's snapshot begins, if it has not."""
        if (snapshot := self._snapshots.get(bucket)) is not None:
            snapshot.start()

    def arrive(self, bucket: int) -> None:
        """The bucket is about to change."""
        if (snapshot := self._snapshots.get(bucket)) is not None:
            snapshot.start()
            snapshot.arrive()

    def start_all(self) -> None:
        """All snapshots begin: no window that would start them may come."""
        for snapshot in self._snapshots.values():
            snapshot.start()

    def arrive_all(self) -> None:
        """Any bucket may change from here on."""
        self.start_all()
        for snapshot in self._snapshots.values():
            snapshot.arrive()


class Executor:
    """Executes instructions, and knows the holds that they have taken.

    `free`: what `Free` does; None: there is none. `offloading` moves activations; None: they stay.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        gradients: Gradients,
        free: Callable[[], None] | None,
        offloading: Offloading | None,
    ) -> None:
        self._buckets, self._gradients = buckets, gradients
        self._free, self._offloading = free, offloading
        self.lingering = Lingering(buckets)
        self.staging = Staging()
        self.holds: Counter[int] = Counter()
        self.executed: list[Instruction] = []
        """of this window, in order"""
        self._timeline: Timeline | None = None

    def note_times(self, timeline: Timeline | None) -> None:
        """Notes the times of instructions in `timeline` from now on."""
        self._timeline = timeline

    def execute(self, instructions: Iterator[Instruction]) -> None:
        """Executes them in order. Updates are for `finish`."""
        timeline = self._timeline
        with unseen():
            for instruction in instructions:
                self.executed.append(instruction)
                before = None if timeline is None else timeline.mark(self._lands(instruction))
                match instruction:
                    case Unshard(bucket):
                        self._buckets[bucket].unshard()
                        self.holds[bucket] += 1
                    case Wait(bucket):
                        self._buckets[bucket].wait()
                    case Reshard(bucket):
                        self.holds[bucket] -= 1
                        self.lingering.reshard(bucket)
                    case Reduce(bucket):
                        self._gradients.issue(bucket)
                    case Settle(bucket):
                        self._gradients.reductions.settle(bucket)
                    case ReduceAcross(bucket):
                        self._gradients.cross(bucket)
                    case GatherAcross(bucket):
                        self._buckets[bucket].gather_across()
                    case Stage(bucket):
                        self.staging.start(bucket)
                    case Free():
                        assert self._free is not None
                        self._free()
                    case Offload() | Release() | Reload():
                        assert self._offloading is not None
                        self._offloading.move(instruction, timeline)
                    case _:  # the program runs and ends calls itself
                        assert isinstance(instruction, Run | End), f"{instruction} is not for `execute`"
                if timeline is not None:
                    timeline.add(instruction, before)

    def finish(self, instructions: Iterable[Instruction], update: Callable[[Sequence[int]], object]) -> None:
        """Executes the end of a window. `update(bucket ids)` carries out neighbouring `Update`s.

        While times are noted, it is called for each one separately.
        """
        for updates, neighbours in groupby(instructions, lambda instruction: isinstance(instruction, Update)):
            if not updates:
                self.execute(neighbours)
            elif self._timeline is None:
                self._update(cast(Sequence[Update], tuple(neighbours)), update)
            else:
                for each in cast(Iterable[Update], neighbours):
                    before = self._timeline.mark()
                    self._update((each,), update)
                    self._timeline.add(each, before)

    def _lands(self, instruction: Instruction) -> bool:
        """True for a `Settle` with work to do. A program that reads gradients has settled what was in flight."""
        return isinstance(instruction, Settle) and instruction.bucket in self._gradients.reductions.in_flight

    def _update(self, instructions: Sequence[Update], update: Callable[[Sequence[int]], object]) -> None:
        self.executed += instructions
        buckets = [instruction.bucket for instruction in instructions]
        for bucket in buckets:
            self.staging.arrive(bucket)
            self._buckets[bucket].still()
        try:
            update(buckets)
        finally:
            for bucket in buckets:
                self._buckets[bucket].rewritten()

    def drop_holds(self) -> None:
        """Drops every hold."""
        for bucket, held in sorted(self.holds.items()):
            self.execute(iter([Reshard(bucket)] * held))

    def clear(self) -> None:
        """Forgets what was executed."""
        self.executed.clear()

    def next_window(self) -> None:
        """Drops every hold that no instruction has dropped, and forgets what was executed."""
        for bucket in sorted(self.holds.elements()):
            self.lingering.reshard(bucket)
        self.holds, self.executed = Counter(), []
