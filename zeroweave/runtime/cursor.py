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
        at = len(instructions)
        self._next = [at] * (at + 1)
        """for each place, where the next event or update is; the end where nothing like that comes any more"""
        for index in reversed(range(at)):
            at = self._next[index] = index if isinstance(instructions[index], _EVENTS) else at

    @property
    def event(self) -> Instruction | None:
        """The next event or update; None where nothing like that comes any more."""
        at = self._next[self.index]
        return None if at == len(self._instructions) else self._instructions[at]

    @property
    def launch(self) -> Sequence[Instruction]:
        """The next event or update, with the others of its launch."""
        at = self._next[self.index]
        before = self._instructions[at - 1] if at > self.index else None
        return self._instructions[at : at + (before.count if isinstance(before, Fuse) else 1)]

    def beyond(self, kind: type[Instruction]) -> Instruction | None:
        """The next event or update that is not of this kind."""
        at = self._next[self.index]
        while at < len(self._instructions) and isinstance(self._instructions[at], kind):
            at = self._next[at + 1]
        return None if at == len(self._instructions) else self._instructions[at]

    def ahead(self, instruction: Instruction) -> bool:
        """Is the instruction still to come?"""
        return instruction in self._instructions[self.index :]

    def to_event(self) -> Iterator[Instruction]:
        """Takes all up to and including the next event or update, one by one; of a launch, all that belong to it."""
        return self._take(self._next[self.index] + 1)

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
