"""The engine's methods about schedules: record one, make another, follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from zeroweave.engine.guard import Guard
from zeroweave.engine.scheduler import Recording, Scheduler, Settings
from zeroweave.errors import EngineError
from zeroweave.schedule import Instruction, Operations, Pass, Schedule

Prefetch = int | Literal["auto"]
Keep = Literal["auto", "none", "all"] | Iterable[str]


class Plan:
    """A schedule that an engine can follow; made by `engine.compile_schedule`, of the step that was `measured`."""

    def __init__(
        self, scheduler: Scheduler, guard: Guard, schedule: Schedule, settings: Settings, measured: Schedule | None
    ) -> None:
        self._scheduler, self._guard, self._measured = scheduler, guard, measured
        self.schedule = schedule
        self.settings = settings

    def use(self) -> None:
        """Follows it from the next step on. Collective, between two optimizer steps."""
        with self._guard("use"):
            self._scheduler.use(self.schedule, self.settings, self._measured)

    @contextmanager
    def execute(self) -> Iterator[Schedule]:
        """Steps inside follow it, later ones what was followed before. Collective, between two optimizer steps."""
        before = self._scheduler.present()
        self.use()
        yield self.schedule
        if before is not None:
            with self._guard("use"):
                self._scheduler.use(*before)


class Scheduling:
    """A part of `Engine`."""

    _scheduler: Scheduler
    _guard: Guard
    _executed: tuple[Instruction, ...]

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the next step follows; None before the first step has been recorded."""
        return self._scheduler.schedule

    @property
    def executed(self) -> tuple[Instruction, ...]:
        """The instructions that the last optimizer step executed."""
        return self._executed

    def record(self) -> AbstractContextManager[Recording]:
        """Times whole steps inside, while they train as ever. Collective.

        What it yields has, at the end of the block, `operations` (every collective of the last step, in order) and
        `graph` (what depends on what). The times of `operations` are this rank's, the costs that schedules are made
        from those of the slowest rank. Reading the clock costs a few microseconds for each instruction, and one
        wait for the device at the end of each step.
        """
        return self._scheduler.record()

    def compile_schedule(
        self,
        operations: Operations,
        prefetch_ahead: Prefetch | None = None,
        keep: Keep | None = None,
        memory_budget: int | None = None,
        fuse: bool | None = None,
        depth: int | None = None,
    ) -> Plan:
        """Makes a schedule from what was recorded; nothing changes yet.

        What is None stays as the config, or the last `reschedule`, has it. All ranks must make the same plan before
        they use it. Raises EngineError for a setting that is refused and ScheduleError
        where a pass of your own breaks the schedule.
        """
        changes = _changes(prefetch_ahead, keep, memory_budget, fuse, depth)
        with self._guard("compile_schedule"):
            settings = self._scheduler.settings.changed(changes)
            measured = operations.schedule
            schedule = self._scheduler.compile(measured, settings, operations.costs, measured)
            return Plan(self._scheduler, self._guard, schedule, settings, measured)

    def use(self, plan: Plan) -> None:
        """Follows `plan` from the next step on. Collective, between two optimizer steps.

        Raises AgreementError on all ranks unless all follow the same one.
        """
        plan.use()

    def reschedule(
        self,
        prefetch: Prefetch | None = None,
        keep: Keep | None = None,
        memory_budget: int | None = None,
        fuse: bool | None = None,
        depth: int | None = None,
    ) -> Schedule | None:
        """Changes how the next steps communicate; nothing is recompiled. Collective, between two optimizer steps.

        What is None stays. Returns the new schedule; None where no step has been recorded yet: the settings then
        hold for the first one. Raises as `compile_schedule` and `use` do.
        """
        with self._guard("reschedule"):
            return self._scheduler.reschedule(_changes(prefetch, keep, memory_budget, fuse, depth))

    def register_pass(self, new: Pass, after: str | None = None) -> None:
        """Adds a pass of your own behind the one called `after`, or behind all; on all ranks.

        A pass is a pure function from a `Schedule` to a `Schedule`. It takes effect with the next schedule that is
        made; one that makes a schedule illegal is a ScheduleError that names the pass and the instruction.
        """
        with self._guard("register_pass"):
            self._scheduler.register_pass(new, after)


def _changes(
    prefetch: Prefetch | None, keep: Keep | None, budget: int | None, fuse: bool | None, depth: int | None
) -> dict[str, Any]:
    for name, value, least in (("prefetch", prefetch, 0), ("memory_budget", budget, 0), ("depth", depth, 1)):
        if value is not None and value != "auto" and (not isinstance(value, int) or value < least):
            raise EngineError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if isinstance(keep, str) and keep not in ("auto", "none", "all"):
        raise EngineError(f"keep must be 'auto', 'none', 'all' or names of buckets, not {keep!r}")
    retain = keep if keep is None or isinstance(keep, str) else tuple(keep)
    changes = {"prefetch": prefetch, "retain": retain, "budget": budget, "fuse": fuse, "depth": depth}
    return {name: value for name, value in changes.items() if value is not None}
