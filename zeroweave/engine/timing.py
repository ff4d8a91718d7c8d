"""Which windows are timed, and what comes of it: the steps that schedules are made from, and recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeroweave.engine.context import EngineContext
from zeroweave.engine.headroom import Headroom
from zeroweave.errors import EngineError, ScheduleError
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Costs, Graph, Operations, Schedule, Step, costs_of


class Recording:
    """What `engine.record()` yields: empty inside the block, filled at its end."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._operations: Operations | None = None

    @property
    def operations(self) -> Operations:
        """Every collective of the last recorded step, in order. EngineError if no step was recorded."""
        if self._operations is None:
            raise EngineError(
                "[ZW704] no step was recorded: record() must surround whole steps that follow a schedule, which the "
                "first step and one that departs do not"
            )
        return self._operations

    @property
    def graph(self) -> Graph:
        """The dependencies between the instructions of the recorded schedule."""
        return self.operations.graph

    def finish(self, room: int, agree: Callable[[Schedule | None, Costs | None], Costs | None]) -> None:
        """Called at the end of the block, on all ranks; the costs are those that `agree` finds, if it finds any."""
        schedule = self.steps[-1].schedule if self.steps else None
        steps = tuple(step for step in self.steps if step.schedule is schedule)
        mine = costs_of(steps, room) if steps else None
        agreed = agree(schedule, mine)
        if mine is not None:
            self._operations = Operations(steps, mine if agreed is None else agreed, agreed is not None)


class Timing:
    """The timeline of the open window, where it has one, and the recordings that are open."""

    def __init__(self, parts: EngineContext, headroom: Headroom) -> None:
        self._parts, self._headroom = parts, headroom
        self._recordings: list[Recording] = []
        """those that are open"""
        self._timeline: Timeline | None = None
        """of the open window, while it is timed"""

    @property
    def is_on(self) -> bool:
        """True if the instructions of the open window are timed."""
        return self._timeline is not None

    def window_ended(self, applied: bool) -> Step | None:
        """The step that has just been timed; None if there is none, or it did not follow its schedule.

        A step that was not `applied` says nothing about the time that steps take.
        """
        replay = self._parts.runtime.replay
        timeline, schedule = self._timeline, replay.schedule
        if not applied or timeline is None or schedule is None or not replay.following:
            return None
        try:
            step = timeline.step(schedule)
        except ScheduleError:  # recording began in the middle of it
            return None
        for recording in self._recordings:
            recording.steps.append(step)
        return step

    def next_window(self, wanted: bool | None) -> None:
        """The window that begins is timed if that is wanted, or a recording is open; None: in no case."""
        timed = wanted is not None and (wanted or self._recordings)
        timeline = self._timeline = Timeline(self._parts.transport.clock) if timed else None
        self._parts.runtime.replay.executor.note_times(timeline)
        self._parts.transport.time(None if timeline is None else timeline.collectives)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Times the steps inside."""
        recording = Recording()
        self._recordings.append(recording)
        if self._timeline is None:
            self.next_window(True)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)
        recording.finish(self._headroom.room(), self._parts.agreements.costs)
