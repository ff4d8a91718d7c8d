"""A window's events in their order, and when the instructions of a step ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.wrappers import Timing
from zeroweave.schedule import Event, Instruction, Moment, Schedule, Step


class _Supposed(NamedTuple):
    """A call of the record, from `entered` to `left`, that belongs there only if some rank has `needed` its buckets."""

    entered: int
    left: int
    needed: bool


class Record:
    """Events in the order in which they happened. Its length is their number."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._supposed: list[_Supposed] = []
        self._dropped: set[int] = set()
        """indices of events that do not count"""

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return (event for index, event in enumerate(self._events) if index not in self._dropped)

    def add(self, event: Event) -> int:
        """One more event; returns its index."""
        self._events.append(event)
        return len(self._events) - 1

    def suppose(self, entered: int, left: int, needed: bool) -> None:
        """The call between these indices stays only if some rank may have needed it. `needed`: this rank may have."""
        self._supposed.append(_Supposed(entered, left, needed))

    def needed(self) -> bytes:
        """A byte for each supposed call, in order: 1 where this rank may have needed it."""
        return bytes(each.needed for each in sorted(self._supposed))

    def prune(self, needed: bytes) -> None:
        """Drops the supposed calls that no rank has needed; `needed` says it for all ranks."""
        unneeded = [each for each, some in zip(sorted(self._supposed), needed, strict=True) if not some]
        self.drop(index for each in unneeded for index in (each.entered, each.left))
        self._supposed.clear()

    def drop(self, indices: Iterable[int]) -> None:
        """The events at these indices do not count."""
        self._dropped.update(indices)

    def clear(self) -> None:
        self._events.clear()
        self._supposed.clear()
        self._dropped.clear()


class _Marked(NamedTuple):
    instruction: Instruction
    before: Mark
    after: Mark
    allocated: int
    most: int
    """bytes in use at most since the instruction before"""
    found: int
    """bytes in use before it, for an instruction that frees memory"""


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
        self._found = 0, 0
        """bytes in use before the instruction that has begun, and at most since the one before it, see `_Marked`"""
        self.collectives: list[Timing] = []

    def mark(self, lands: bool = False) -> Mark:
        """The present point of the compute stream: an instruction begins. `lands`: True if it ends a reduction."""
        if not self._marked:
            self._clock.take_used()  # memory is counted from here on
        self._found = self._clock.take_used() if lands else (0, 0)
        return self._clock.mark()

    def add(self, instruction: Instruction, before: Mark) -> None:
        """An instruction that was executed between `before` and now."""
        after, (allocated, most), (found, earlier) = self._clock.mark(), self._clock.take_used(), self._found
        self._marked.append(_Marked(instruction, before, after, allocated, max(most, earlier), found))

    @contextmanager
    def copying(self, instruction: Instruction, nbytes: int) -> Iterator[None]:
        """Copies made inside, on the stream that is current there, belong to an instruction."""
        before = self._clock.mark()
        yield
        self._copied.append(_Copied(instruction, nbytes, before, self._clock.mark()))

    def step(self, schedule: Schedule) -> Step:
        """The step in seconds. Waits for the device. ScheduleError if it did not follow `schedule` to the end."""
        self._clock.finish()
        at = partial(self._clock.seconds, self._marked[0].before if self._marked else None)
        peaks = [*map(_above, self._marked[1:]), self._clock.take_used()[1]]
        moments = [
            Moment(m.instruction, at(m.before), at(m.after), m.allocated, max(m.allocated, peak), m.found)
            for m, peak in zip(self._marked, peaks, strict=bool(self._marked))
        ]
        collectives = [(each.kind, each.bucket, at(each.issued), at(each.over)) for each in self.collectives]
        index = schedule.instructions.index
        copied = [each for each in self._copied if each.instruction in schedule.instructions]
        copies = [(index(each.instruction), each.nbytes, at(each.before), at(each.after)) for each in copied]
        return Step.of(schedule, moments, collectives, copies)


def _above(marked: _Marked) -> int:
    """Bytes in use at most since the instruction before, if more than this one has left in use; else 0."""
    return marked.most if marked.most > marked.allocated else 0
