"""A place in a schedule, which the events of a window move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, cast

from zeroweave.schedule import End, Fuse, Instruction, Reduce, Reload, Reshard, Run, Stage, Unshard, Update, Wait

_EVENTS: Final = (Run, End, Reduce, Update)
_AT_ONCE: Final = (Unshard, Reshard, Reload, Stage)
"""Instructions that wait for nothing."""


class _View(NamedTuple):
    """What lies ahead of a place in a schedule."""

    event: Instruction | None
    """the next event or update; None where nothing like that comes any more"""
    place: int
    """its index"""
    reductions: tuple[int, ...]
    """the buckets of its launch, if it is a reduction"""
    behind: int
    """the place behind it and its launch"""
    trail: int
    """the next instruction that waits"""


class Cursor:
    """The instructions of a schedule, and how many of them have been taken: `index`.

    Many windows follow one schedule, so what lies ahead of each place is found out once. `micro_steps`: see
    `Schedule.micro_steps`.
    """

    def __init__(self, instructions: Sequence[Instruction] = (), micro_steps: Sequence[int] = ()) -> None:
        self._instructions = instructions
        self.index = 0
        events = [i for i, instruction in enumerate(instructions) if isinstance(instruction, Run | End | Reduce)]
        self._micro_steps = dict(zip(events, micro_steps, strict=True))
        view = _View(None, len(instructions), (), len(instructions), len(instructions))
        self._views = [view] * (len(instructions) + 1)
        for index in reversed(range(len(instructions))):
            self._views[index] = view = self._view(index, view)

    def _view(self, index: int, further: _View) -> _View:
        """The view from a place, by that from the next one."""
        event, place, reductions, behind, trail = further
        instruction = first = self._instructions[index]
        if isinstance(instruction, Fuse):
            stop = index + 1 + instruction.count
            first = self._instructions[index + 1]
            if isinstance(first, Reduce):
                launch = cast(Sequence[Reduce], self._instructions[index + 1 : stop])
                reductions, behind = tuple(each.bucket for each in launch), stop
        elif isinstance(instruction, _EVENTS):
            event, place, behind = instruction, index, index + 1
            reductions = (instruction.bucket,) if isinstance(instruction, Reduce) else ()
        return _View(event, place, reductions, behind, trail if isinstance(first, _AT_ONCE) else index)

    def restart(self) -> None:
        """Nothing has been taken."""
        self.index = 0

    @property
    def event(self) -> Instruction | None:
        """The next event or update; None where nothing like that comes any more."""
        return self._views[self.index].event

    @property
    def reductions(self) -> tuple[int, ...]:
        """The buckets of the next event and its launch, if it is a reduction."""
        return self._views[self.index].reductions

    def beyond(self, kind: type[Instruction]) -> Instruction | None:
        """The next event or update that is not of this kind."""
        view = self._views[self.index]
        while isinstance(view.event, kind):
            view = self._views[view.behind]
        return view.event

    def events(self, micro_step: int) -> Iterator[Instruction]:
        """The events to come without a gap that belong to this micro-step of the window."""
        view = self._views[self.index]
        while view.event is not None and self._micro_steps.get(view.place) == micro_step:
            yield view.event
            view = self._views[view.behind]

    def to_waits(self, buckets: Collection[int]) -> Iterator[Instruction]:
        """Takes all up to the last wait for one of these buckets that comes before the next event."""
        ahead = range(self.index, self._views[self.index].place)
        waits = [i for i in ahead if isinstance(each := self._instructions[i], Wait) and each.bucket in buckets]
        return self._take(waits[-1] + 1 if waits else self.index)

    def to_event(self) -> Iterator[Instruction]:
        """Takes all up to and including the next event or update; of a launch, all that belong to it."""
        return self._take(self._views[self.index].behind)

    def trail(self) -> Iterator[Instruction]:
        """Takes what follows and waits for nothing: all up to the next wait or event.

        A `Settle` waits for its reduction, so it comes when the next event does.
        """
        return self._take(self._views[self.index].trail)

    def rest(self) -> Iterator[Instruction]:
        """Takes all that are left."""
        return self._take(len(self._instructions))

    def _take(self, end: int) -> Iterator[Instruction]:
        start, self.index = self.index, max(self.index, end)
        return iter(self._instructions[start : self.index])
