"""A position in a schedule, which the events of a window move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import Final

from zeroweave.schedule import (
    End,
    Instruction,
    Reduce,
    Reload,
    Reshard,
    Run,
    Stage,
    Unshard,
    Update,
    Wait,
)
from zeroweave.schedule.instructions import is_event

_EVENTS: Final = (Run, End, Reduce, Update)
_AT_ONCE: Final = (Unshard, Reshard, Reload, Stage)
"""Instructions that wait for nothing."""


class Cursor:
    """The instructions of a schedule, and how many of them have been taken: `index`.

    Many windows follow one schedule, so what comes next is computed once for each index. `micro_steps`: see
    `Schedule.micro_steps`.
    """

    def __init__(self, instructions: Sequence[Instruction] = (), micro_steps: Sequence[int] = ()) -> None:
        self._instructions = instructions
        self.index = 0
        events = [i for i, instruction in enumerate(instructions) if is_event(instruction)]
        self._micro_steps = dict(zip(events, micro_steps, strict=True))
        end = len(instructions)
        self._events, self._trails = [end] * (end + 1), [end] * (end + 1)
        """for each index, the position of the next event or update, and of the next instruction that waits"""
        for index in reversed(range(end)):
            instruction = instructions[index]
            self._events[index] = index if isinstance(instruction, _EVENTS) else self._events[index + 1]
            self._trails[index] = self._trails[index + 1] if isinstance(instruction, _AT_ONCE) else index

    def restart(self) -> None:
        """Nothing has been taken."""
        self.index = 0

    @property
    def event(self) -> Instruction | None:
        """The next event or update; None where nothing like that comes any more."""
        position = self._events[self.index]
        return self._instructions[position] if position < len(self._instructions) else None

    @property
    def reduction(self) -> int | None:
        """The bucket of the next event, if that is a reduction."""
        event = self.event
        return event.bucket if isinstance(event, Reduce) else None

    def beyond(self, kind: type[Instruction]) -> Instruction | None:
        """The next event or update that is not of this kind."""
        events = map(self._instructions.__getitem__, self._positions())
        return next((event for event in events if not isinstance(event, kind)), None)

    def events(self, micro_step: int) -> Iterator[Instruction]:
        """The events to come without a gap that belong to this micro-step of the window."""
        positions = takewhile(lambda position: self._micro_steps.get(position) == micro_step, self._positions())
        return map(self._instructions.__getitem__, positions)

    def _positions(self) -> Iterator[int]:
        """Those of the events and updates to come."""
        position = self._events[self.index]
        while position < len(self._instructions):
            yield position
            position = self._events[position + 1]

    def to_waits(self, buckets: Collection[int]) -> Iterator[Instruction]:
        """Takes all up to the last wait for one of these buckets that comes before the next event."""
        ahead = range(self.index, self._events[self.index])
        waits = [i for i in ahead if isinstance(each := self._instructions[i], Wait) and each.bucket in buckets]
        return self._take(waits[-1] + 1 if waits else self.index)

    def to_event(self) -> Iterator[Instruction]:
        """Takes all up to and including the next event or update."""
        return self._take(self._events[self.index] + 1)

    def trail(self) -> Iterator[Instruction]:
        """Takes what follows and waits for nothing: all up to the next wait or event.

        A `Settle` waits for its reduction, so it comes when the next event does.
        """
        return self._take(self._trails[self.index])

    def rest(self) -> Iterator[Instruction]:
        """Takes all that are left."""
        return self._take(len(self._instructions))

    def _take(self, end: int) -> Iterator[Instruction]:
        start, self.index = self.index, max(self.index, min(end, len(self._instructions)))
        return iter(self._instructions[start : self.index])
