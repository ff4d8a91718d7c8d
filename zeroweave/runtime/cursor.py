"""A place in a schedule, which the events of a window move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from zeroweave.schedule import End, Fuse, Instruction, Reduce, Reload, Reshard, Run, Unshard, Update

_EVENTS: Final = (Run, End, Reduce, Update)
_AT_ONCE: Final = (Unshard, Reshard, Reload)
"""Instructions that wait for nothing."""


class Cursor:
    """The instructions of a schedule, and how many of them have been taken: `index`."""

    def __init__(self, instructions: Sequence[Instruction] = ()) -> None:
        self._instructions = instructions
        self.index = 0

    @property
    def next(self) -> int:
        """Where the next event or update is; the end where nothing like that comes any more."""
        rest = range(self.index, len(self._instructions))
        return next((i for i in rest if isinstance(self._instructions[i], _EVENTS)), len(self._instructions))

    @property
    def event(self) -> Instruction | None:
        """The next event or update; None where nothing like that comes any more."""
        at = self.next
        return None if at == len(self._instructions) else self._instructions[at]

    @property
    def launch(self) -> Sequence[Instruction]:
        """The next event or update, with the others of its launch."""
        at = self.next
        before = self._instructions[at - 1] if at > self.index else None
        return self._instructions[at : at + (before.count if isinstance(before, Fuse) else 1)]

    def beyond(self, kind: type[Instruction]) -> Instruction | None:
        """The next event or update that is not of this kind."""
        for index in range(self.index, len(self._instructions)):
            instruction = self._instructions[index]
            if isinstance(instruction, _EVENTS) and not isinstance(instruction, kind):
                return instruction
        return None

    def ahead(self, instruction: Instruction) -> bool:
        """Is the instruction still to come?"""
        return instruction in self._instructions[self.index :]

    def to_event(self) -> Iterator[Instruction]:
        """Takes all up to and including the next event or update, one by one; of a launch, all that belong to it."""
        return self._take(self.next + 1)

    def rest(self) -> Iterator[Instruction]:
        """Takes all that are left, one by one."""
        return self._take(len(self._instructions))

    def _take(self, end: int) -> Iterator[Instruction]:
        while self.index < end:
            instruction = self._instructions[self.index]
            self.index += 1
            if isinstance(instruction, Fuse):
                end = max(end, self.index + instruction.count)
            yield instruction

    def trail(self) -> Iterator[Instruction]:
        """Takes what follows and waits for nothing, one by one: all up to the next wait or event.

        A `Settle` waits for its reduction, so it comes when the next event does.
        """
        while self.index < len(self._instructions) and self._waits_for_nothing(self.index):
            self.index += 1
            yield self._instructions[self.index - 1]

    def _waits_for_nothing(self, index: int) -> bool:
        first = self._instructions[index]
        return isinstance(self._instructions[index + 1] if isinstance(first, Fuse) else first, _AT_ONCE)
