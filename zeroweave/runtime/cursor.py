"""A place in a schedule, which the events of a window move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

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

_EVENTS: Final = (Run, End, Reduce, Update)
_AT_ONCE: Final = (Unshard, Reshard, Reload, Stage)
"""Instructions that wait for nothing."""


class _View(NamedTuple):
    """The instructions ahead of a place in a schedule."""

    event: Instruction | None
    """the next event or update; None: none is left"""
    place: int
    """its index"""
    trail: int
    """the next instruction that waits"""


class Cursor:
    """The instructions of a schedule, and how many of them have been taken: `index`.

    Many windows follow one schedule, so the view ahead of each place is computed once. `micro_steps`: see
    `Schedule.micro_steps`.
    """

    def __init__(self, instructions: Sequence[Instruction] = (), micro_steps: Sequence[int] = ()) -> None:
        self._instructions = instructions
        self.index = 0
        events = [i for i, instruction in enumerate(instructions) if isinstance(instruction, Run | End | Reduce)]
        self._micro_steps = dict(zip(events, micro_steps, strict=True))
        view = _View(None, len(instructions), len(instructions))
        self._views = [view] * (len(instructions) + 1)
        for index in reversed(range(len(instructions))):
            instruction = instructions[index]
            event, place = (instruction, index) if isinstance(instruction, _EVENTS) else (view.event, view.place)
            view = _View(event, place, view.trail if isinstance(instruction, _AT_ONCE) else index)
            self._views[index] = view

    def restart(self) -> None:
        """Nothing has been taken."""
        self.index = 0

    @property
    def event(self) -> Instruction | None:
        """The next event or update; None where nothing like that comes any more."""
        return self._views[self.index].event

    @property
    def reduction(self) -> int | None:
        """The bucket of the next event, if that is a reduction."""
        event = self.event
        return event.bucket if isinstance(event, Reduce) else None

    def beyond(self, kind: type[Instruction]) -> Instruction | None:
        """The next event or update that is not of this kind."""
        view = self._views[self.index]
        while isinstance(view.event, kind):
            view = self._views[self._behind(view)]
        return view.event

    def events(self, micro_step: int) -> Iterator[Instruction]:
        """The events to come without a gap that belong to this micro-step of the window."""
        view = self._views[self.index]
        while view.event is not None and self._micro_steps.get(view.place) == micro_step:
            yield view.event
            view = self._views[self._behind(view)]

    def to_waits(self, buckets: Collection[int]) -> Iterator[Instruction]:
        """Takes all up to the last wait for one of these buckets that comes before the next event."""
        ahead = range(self.index, self._views[self.index].place)
        waits = [i for i in ahead if isinstance(each := self._instructions[i], Wait) and each.bucket in buckets]
        return self._take(waits[-1] + 1 if waits else self.index)

    def to_event(self) -> Iterator[Instruction]:
        """Takes all up to and including the next event or update."""
        return self._take(self._behind(self._views[self.index]))

    def trail(self) -> Iterator[Instruction]:
        """Takes what follows and waits for nothing: all up to the next wait or event.

        A `Settle` waits for its reduction, so it comes when the next event does.
        """
        return self._take(self._views[self.index].trail)

    def rest(self) -> Iterator[Instruction]:
        """Takes all that are left."""
        return self._take(len(self._instructions))

    def _behind(self, view: _View) -> int:
        """The place after the event of a view."""
        return min(view.place + 1, len(self._instructions))

    def _take(self, end: int) -> Iterator[Instruction]:
        start, self.index = self.index, max(self.index, end)
        return iter(self._instructions[start : self.index])
