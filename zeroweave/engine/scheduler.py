"""The scheduler: which schedule the next window follows, and when that changes.

    step 1           on demand: its events are the record that the first schedule is made from
    step 2           follows it; nothing is measured, because much happens for the first time
    steps 3 …        `compile.record_steps` steps whose instructions are timed, while they train
    the step after   the ranks put their costs together, each makes the same better schedule, and all follow it

A step that departs from its schedule is recorded again, and where it is of a new kind, the same begins for that. What
was found for other kinds stays: see `schedule.kinds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from zeroweave.engine.context import EngineContext
from zeroweave.engine.guard import Guard
from zeroweave.engine.headroom import Headroom
from zeroweave.engine.settings import ScheduleSettings, passes_of, settings_of
from zeroweave.errors import EngineError, RefusedPass, ScheduleError
from zeroweave.ranks.control import Decision
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import (
    PASSES,
    Costs,
    Event,
    Facts,
    Graph,
    Operations,
    Pass,
    Schedule,
    Step,
    WindowKind,
    WindowKinds,
    costs_of,
    foreseen,
    simulate,
)

_WARM_STEPS = 1


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


class Scheduler:
    """The schedules of one engine. `base`: what they are made from, before the settings are put in."""

    def __init__(self, context: EngineContext, base: Facts, headroom: Headroom) -> None:
        self._headroom = headroom
        self._context, self._runtime, self._transport = context, context.runtime, context.transport
        self._agreements, self._guard, self._base = context.agreements, context.guard, base
        self._journal = context.journal
        self._settle_on(settings_of(context.config))
        self.passes: list[Pass] = [*PASSES, *passes_of(context.config)]
        self._accepted = tuple(self.passes)
        """those by which the last schedule was made"""
        self._record_steps = context.config.compile.record_steps
        self._kinds = WindowKinds()
        self._kind: WindowKind | None = None
        """of what the next window follows"""
        self._as_expected = False
        """true if the last window followed its schedule"""
        self._recordings: list[Recording] = []
        """those that are open"""
        self._timeline: Timeline | None = None
        """of the open window, while it is timed"""
        self.seconds = 0.0
        """spent on making schedules"""

    @property
    def schedule(self) -> Schedule | None:
        """What the next window follows."""
        return self._runtime.replay.schedule

    @property
    def settled(self) -> bool:
        """True if the last window has followed its schedule, and that of the next one will not change by itself."""
        enough = _WARM_STEPS + (self._record_steps if self._automatic else 0)
        return self._as_expected and self._kind is not None and self._kind.followed >= enough

    @property
    def foreseen(self) -> int:
        """Bytes of the device that the next window is expected to need at most; 0 where that is unknown."""
        kind = self._kind
        if kind is None or kind.costs is None or not kind.costs.peak:
            return 0
        return foreseen(kind.costs, kind.schedule)

    # ------------------------------------------------------------------ making schedules
    def _compile(
        self, record: tuple[Event, ...], settings: ScheduleSettings, costs: Costs | None, measured: Schedule | None
    ) -> Schedule:
        """Where that fails, the passes that have been registered since the last schedule are taken back."""
        begin = time.perf_counter()
        try:
            made = settings.schedule(record, self._base, costs, measured, self.passes)
        except Exception:
            self.passes = list(self._accepted)
            raise
        finally:
            self.seconds += time.perf_counter() - begin
        self._accepted = tuple(self.passes)
        return made

    def _asked_for(self, record: tuple[Event, ...], settings: ScheduleSettings, *known: Any) -> Schedule:
        """As `_compile`, before anything has changed: RefusedPass, which leaves the engine as it is, where it fails."""
        try:
            return self._compile(record, settings, *known)
        except EngineError:
            raise
        except Exception as error:
            told = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
            raise RefusedPass(f"{told}; the passes are those of the last schedule again") from error

    def candidate(self, followed: bool) -> Schedule:
        """What this rank would follow after the step that ends now."""
        self._headroom.look()
        replay = self._runtime.replay
        if followed:
            assert replay.schedule is not None
            return replay.schedule
        record = tuple(replay.record)
        known = self._kinds.measured_on(record)  # what was measured tells nothing about another record
        costs, measured = (None, None) if known is None else (known.costs, known.measured)
        return self._compile(record, self.settings, costs, measured)

    def window_began(self) -> None:
        """With its first call."""
        self._headroom.begin()

    def register_pass(self, new: Pass, after: str | None) -> None:
        """Adds a pass after the one called `after`, or at the end; takes effect with the next schedule."""
        names = [getattr(known, "__name__", "") for known in self.passes]
        if after is not None and after not in names:
            raise EngineError(f"there is no pass {after!r}; the passes are {', '.join(names)}")
        at = len(names) if after is None else len(names) - names[::-1].index(after)
        self.passes.insert(at, new)

    def unregister_pass(self, old: Pass) -> None:
        """Removes a user's pass; takes effect with the next schedule."""
        if old not in self.passes or old in PASSES:
            own = [getattr(known, "__name__", repr(known)) for known in self.passes if known not in PASSES]
            raise EngineError(f"{old!r} is no registered pass of your own; these are: {', '.join(own) or 'none'}")
        self.passes.remove(old)
        self._accepted = tuple(known for known in self._accepted if known is not old)

    # ------------------------------------------------------------------ at the end of a step
    def next(self, candidate: Schedule, decision: Decision, applied: bool = True) -> Schedule | None:
        """What the next window follows, by what the ranks know together.

        A step that was not `applied` says nothing about the time that steps take.
        """
        if self._transport.skips:  # nothing that is tried out decides anything
            self.abort()
            return self.schedule
        short = self._headroom.is_short()
        step = self._timed(applied)
        if not decision.adopt:  # what was found for windows that all ranks had in common may be the reason
            self._journal.tell("schedule", "the ranks' steps differ: the next one is gathered and reduced on demand")
            self._as_expected = False
            self._follow(None)
            self._kinds.restart(None)
            self._time_next(None)
            return None
        kind = self._kinds.of(candidate, decision.record)
        same = self._as_expected = self._kind is kind and kind.schedule.fingerprint == candidate.fingerprint
        kind.came(candidate, decision.record, followed=same and applied)
        if not (same or kind.followed):
            count = len(candidate.instructions)
            self._journal.tell("schedule", f"steps like the last one follow its record: {count} instructions")
        enough = _WARM_STEPS + self._record_steps
        if same and applied and self._automatic and _WARM_STEPS < kind.followed <= enough:
            if step is not None:
                kind.timed(step)
            if kind.followed == enough:
                self._improve(kind)
        if not (short and self._fill_less(kind)):
            self._follow(self._kinds.upcoming)
        assert self._kind is not None
        wanted = self._automatic and _WARM_STEPS <= self._kind.followed < enough
        self._time_next(wanted)
        return self._kind.schedule

    @property
    def _automatic(self) -> bool:
        auto = self.settings.prefetch == "auto" or self.settings.keep == "auto"
        return auto and self._record_steps > 0

    def _improve(self, kind: WindowKind) -> None:
        schedule = kind.schedule
        steps = [step for step in kind.steps if step.schedule is schedule]
        kind.forget_steps()
        mine = costs_of(steps, self._headroom.room()) if steps else None
        found = self._agreements.costs(schedule, mine)
        if found is None:  # the ranks compute different things, each in its own time
            return
        agreed = self._headroom.foresee(found)
        kind.measure(agreed)
        better = self._compile(schedule.record, self.settings, agreed, schedule)
        # By all ranks: what they have measured on may differ in what waits for no rank, such as moves of activations.
        self._agreements.schedule(better)
        if better.instructions != schedule.instructions:
            self._runtime.restart_peaks()
            if len(self._kinds.schedules) == 1:  # windows of other kinds gather in them, too
                self._runtime.registered_buffers.spare()
            before, after = (1000 * simulate(each, agreed).seconds for each in (schedule, better))
            self._journal.tell(
                "schedule", f"by what steps have cost: {after:.1f} ms a step predicted, {before:.1f} ms as before"
            )
        kind.follow(better)
        self._transport.clock.give_back()  # blocks are of the sizes that the steps before have needed at once
        self._headroom.found_out()

    def _follow(self, kind: WindowKind | None) -> None:
        """The next window is of this kind. Memory is looked at where its schedule fills what is free."""
        self._kind = kind
        self._headroom.watch(kind.costs if kind is not None and self._fills(kind) else None)

    def _fills(self, kind: WindowKind) -> bool:
        """True if, by what is known now, its schedules fill what is free. Else they are as without a budget."""
        return self.settings.memory_budget == "auto" and self.settings.memory(kind.costs, kind.measured) is not None

    def _fill_less(self, kind: WindowKind) -> bool:
        """Steps take more memory than was foreseen: makes a new schedule for what is left. On all ranks.

        False where nothing can be spared.
        """
        if kind.costs is None or kind.measured is None or not self._fills(kind):
            return False
        before, costs = kind.schedule, self._headroom.agree(kind.costs, kind.schedule)
        smaller = self._compile(before.record, self.settings, costs, kind.measured)
        self._headroom.found_out()
        if smaller.instructions == before.instructions:
            kind.revise(costs)
            return False
        self._agreements.schedule(smaller)
        least, most = foreseen(costs, smaller), foreseen(costs, before)
        self._journal.tell(
            "schedule",
            f"memory is short, with {most / 2**20:.0f} MiB in use at most: the next steps are expected to take "
            f"{least / 2**20:.0f} MiB",
        )
        self._follow(WindowKind(smaller, None, costs, kind.measured, _WARM_STEPS + self._record_steps))
        self._kinds.restart(self._kind)  # the others were made with more room
        self._runtime.registered_buffers.spare()
        self._runtime.restart_peaks()
        return True

    def abort(self) -> None:
        """What was recorded and timed of the open window is no step."""
        self._headroom.abort()
        if self._timeline is not None:
            self._time_next(True)

    # ------------------------------------------------------------------ times
    def _timed(self, applied: bool) -> Step | None:
        """The step that has just been timed; None if there is none, or it did not follow its schedule.

        A step that was not `applied` says nothing about the time that steps take.
        """
        replay = self._runtime.replay
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

    def _time_next(self, wanted: bool | None) -> None:
        """The window that begins is timed if that is wanted, or a recording is open; None: in no case."""
        timed = wanted is not None and (wanted or self._recordings)
        timeline = self._timeline = Timeline(self._transport.clock) if timed else None
        self._runtime.replay.executor.note_times(timeline)
        self._transport.time(None if timeline is None else timeline.collectives)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Times the steps inside."""
        recording = Recording()
        self._recordings.append(recording)
        if self._timeline is None:
            self._time_next(True)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)
        recording.finish(self._headroom.room(), self._agreements.costs)

    # ------------------------------------------------------------------ changes that are asked for
    @property
    def measured(self) -> Schedule | None:
        """The schedule whose costs the next window's was made from."""
        return None if self._kind is None else self._kind.measured

    def use(self, schedule: Schedule, settings: ScheduleSettings, measured: Schedule | None) -> None:
        """Follows `schedule`, made with `settings`, from the next window on. Collective, between windows.

        `measured`: the schedule whose costs it was made from. One that is made without costs, by settings that would
        decide by them, is followed until they have been measured.
        """
        if not self._context.between_windows:
            raise EngineError(
                "[ZW402] the schedule can change between two optimizer steps only: after step() or zero_grad()"
            )
        self._agreements.schedule(schedule)
        self._journal.tell(
            "schedule", f"another one was asked for: {settings.changes(self.settings) or 'settings stay'}"
        )
        self._settle_on(settings)
        costs = None if measured is None else schedule.facts.costs
        followed = 0 if measured is None else _WARM_STEPS + self._record_steps
        self._as_expected = True
        self._headroom.found_out()
        self._follow(WindowKind(schedule, None, costs, measured, followed))
        self._kinds.restart(self._kind)  # the others were made with other settings
        self._runtime.next_window(schedule)
        self._runtime.restart_peaks()
        self._time_next(False)

    def _settle_on(self, settings: ScheduleSettings) -> None:
        self.settings = settings
        self._runtime.replay.limit_reductions(settings.depth)

    def reschedule(self, changes: Mapping[str, Any]) -> Schedule | None:
        """Another schedule of the present record, with some settings changed. Collective, between windows."""
        settings = replace(self.settings, **changes)
        settings.facts(self._base)
        current = self.schedule
        if current is None:
            self._settle_on(settings)
            self._kinds.restart(None)
            return None
        costs, measured = (None, None) if self._kind is None else (self._kind.costs, self.measured)
        schedule = self._asked_for(current.record, settings, costs, measured)
        self._runtime.registered_buffers.spare()
        self.use(schedule, settings, measured)
        return schedule

    def plan(self, operations: Operations, changes: Mapping[str, Any]) -> Plan:
        """A schedule that could be followed, made from what was recorded; nothing changes yet."""
        settings, recorded = replace(self.settings, **changes), operations.schedule
        # Ranks that decided by their own costs would have other schedules.
        costs, measured = (self._headroom.foresee(operations.costs), recorded) if operations.agreed else (None, None)
        schedule = self._asked_for(recorded.record, settings, costs, measured)
        return Plan(self, self._guard, schedule, settings, measured)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A schedule that an engine can follow; made by `engine.compile_schedule`, of the step that was measured."""

    _scheduler: Scheduler
    _guard: Guard
    schedule: Schedule
    settings: ScheduleSettings
    _measured: Schedule | None

    def use(self) -> None:
        """Follows it from the next step on. Collective, between two optimizer steps."""
        with self._guard("use"):
            self._scheduler.use(self.schedule, self.settings, self._measured)

    @contextmanager
    def execute(self) -> Iterator[Schedule]:
        """Steps inside follow it, later ones what was followed before. Collective, between two optimizer steps."""
        scheduler = self._scheduler
        before, settings, measured = scheduler.schedule, scheduler.settings, scheduler.measured
        self.use()
        yield self.schedule
        if before is not None:
            with self._guard("use"):
                scheduler.use(before, settings, measured)
