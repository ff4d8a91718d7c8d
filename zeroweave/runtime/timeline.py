"""When the instructions of a step ran: marks, made while it trains, and read when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.timed import Timing
from zeroweave.schedule import Instruction, Moment, Schedule, Step


class _Marked(NamedTuple):
    instruction: Instruction
    before: Mark
    after: Mark
    allocated: int


class _Copied(NamedTuple):
    instruction: Instruction
    nbytes: int
    before: Mark
    after: Mark


class Timeline:
    """One step's marks. `collectives` is where the transport notes its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marked: list[_Marked] = []
        self._copied: list[_Copied] = []
        self.collectives: list[Timing] = []

    def mark(self) -> Mark:
        """Where the compute stream is now."""
        return self._clock.mark()

    def add(self, instruction: Instruction, before: Mark) -> None:
        """An instruction that was executed between `before` and now."""
        self._marked.append(_Marked(instruction, before, self._clock.mark(), self._clock.allocated()))

    @contextmanager
    def copying(self, instruction: Instruction, nbytes: int) -> Iterator[None]:
        """What is copied inside, on the stream that is current there, belongs to an instruction."""
        before = self._clock.mark()
        yield
        self._copied.append(_Copied(instruction, nbytes, before, self._clock.mark()))

    def step(self, schedule: Schedule) -> Step:
        """The step in seconds. Waits for the device. ScheduleError if it did not follow `schedule` to the end."""
        clock = self._clock
        clock.finish()
        start = self._marked[0].before if self._marked else None
        moments = [
            Moment(
                each.instruction, clock.seconds(start, each.before), clock.seconds(start, each.after), each.allocated
            )
            for each in self._marked
        ]
        collectives = [
            (each.kind, each.bucket, clock.seconds(start, each.issued), clock.seconds(start, each.over))
            for each in self.collectives
        ]
        copies = [
            (
                schedule.instructions.index(each.instruction),
                each.nbytes,
                clock.seconds(start, each.before),
                clock.seconds(start, each.after),
            )
            for each in self._copied
            if each.instruction in schedule.instructions
        ]
        return Step.of(schedule, moments, collectives, copies)
