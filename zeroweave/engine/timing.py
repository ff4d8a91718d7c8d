"""Which windows are timed, and what comes of it: the steps that schedules are made from, and recordings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from zeroweave.engine.headroom import Headroom
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.recording import Recording
from zeroweave.errors import ScheduleError
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Step, WindowKind

_LONGEST_HOLD: Final = 1.0
"""Seconds for which the device is held at most, see `Timeline`."""


class Timing:
    """The timeline of the open window, where it has one, and the recordings that are open."""

    def __init__(self, parts: EngineParts, headroom: Headroom) -> None:
        self._parts, self._headroom = parts, headroom
        self._record_steps = parts.config.compile.record_steps
        self.holds: Final = parts.config.compile.cuda_graphs is True
        """is the device held while steps are timed?"""
        self._recordings: list[Recording] = []
        """those that are open"""
        self._timeline: Timeline | None = None
        """of the open window, while it is timed"""
        self._ended = self._took = 0.0
        """when the last window ended, and how long the last window that was not timed took, for the host"""

    @property
    def is_on(self) -> bool:
        """Are the instructions of the open window timed?"""
        return self._timeline is not None

    def window_ended(self, applied: bool) -> Step | None:
        """The step that has just been timed; None if there is none, or it did not follow its schedule.

        A step that was not `applied` says nothing about the time that steps take.
        """
        now = time.perf_counter()
        if self._timeline is None:  # to take times makes the host slower
            self._took = now - self._ended
        self._ended = now
        return self._take() if applied else None

    def next_window(self, wanted: bool, kind: WindowKind | None) -> None:
        """The window that begins, expected to be of this kind, is timed if that is wanted, or a recording is open."""
        self._note(self._new_timeline(kind) if wanted or self._recordings else None)

    def skip(self) -> None:
        """The window that begins is not timed, nor recorded."""
        self._note(None)

    def _note(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._parts.runtime.replay.executor.note_times(timeline)
        self._parts.transport.time(None if timeline is None else timeline.collectives)

    def _new_timeline(self, kind: WindowKind | None) -> Timeline:
        """Of the window that begins.

        The device of a graph never waits for the host: what its schedule is made from must not, either. A host that
        waits for nothing comes some thousand kernels ahead, where the driver stops it. So the device is held in each
        step at another place, see `costs_of`; at the beginning, where somebody looks at the steps.
        """
        clock = self._parts.transport.clock
        if not self.holds:
            return Timeline(clock)
        at = 0
        if not self._recordings and kind is not None:
            turn = len(kind.steps)
            at = turn * len(kind.schedule.instructions) // max(turn + 1, self._record_steps)
        return Timeline(clock, min(2 * self._took, _LONGEST_HOLD), at)

    def _take(self) -> Step | None:
        replay = self._parts.runtime.replay
        timeline, schedule = self._timeline, replay.schedule
        if timeline is None or schedule is None or not replay.following:
            return None
        try:
            step = timeline.step(schedule)
        except ScheduleError:  # recording began in the middle of it
            return None
        if not timeline.at:  # else recording began in the middle of it, too
            for recording in self._recordings:
                recording.steps.append(step)
        return step

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Times the steps inside."""
        recording = Recording()
        self._recordings.append(recording)
        if self._timeline is None or self._parts.between_windows:  # a timeline may hold the device in its middle
            self.next_window(True, None)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)
        recording.finish(self._headroom.room(), self._parts.agreements.costs)
