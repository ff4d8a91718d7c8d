"""Measured steps for `zeroweave schedule`, where the environment asks an engine for them.

`ZEROWEAVE_SCHEDULE_OUT` names a folder, and each rank writes `rank<r>.json` there. `ZEROWEAVE_SCHEDULE_STEPS` is the
number of optimizer steps after which the script is left, as by `sys.exit()`; without it the script runs to its end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.stats import Stats
from zeroweave.errors import EngineError
from zeroweave.schedule import Measured, costs_of

FOLDER: Final = "ZEROWEAVE_SCHEDULE_OUT"
STEPS: Final = "ZEROWEAVE_SCHEDULE_STEPS"
_MOST: Final = 9


class Samples:
    """Times every step of one engine and keeps one in a file: of the last steps that followed the present schedule,
    nine at most, the one of median duration.
    """

    def __init__(self, scheduler: Scheduler, path: Path, last: int | None) -> None:
        self._path, self._last = path, last
        self._open = ExitStack()  # as long as the engine lives
        self._recording = self._open.enter_context(scheduler.record())

    @classmethod
    def asked_for(cls, scheduler: Scheduler, rank: int, environment: Mapping[str, str] = os.environ) -> Samples | None:
        """None where nobody asks. EngineError for a folder that does not exist, or steps that are no number."""
        folder, last = environment.get(FOLDER), environment.get(STEPS)
        if not folder:
            return None
        if not Path(folder).is_dir():
            raise EngineError(f"{FOLDER} must name a folder, and {folder!r} is none")
        if last is not None and not last.isdecimal():
            raise EngineError(f"{STEPS} must be a whole number, not {last!r}")
        return cls(scheduler, Path(folder) / f"rank{rank}.json", None if last is None else int(last))

    def step_ended(self, step: int, stats: Stats) -> None:
        """After each optimizer step, counted from 1."""
        steps = self._recording.steps
        if steps:
            steps[:] = [each for each in steps if each.schedule is steps[-1].schedule][-_MOST:]
            median = sorted(steps, key=lambda each: each.seconds)[len(steps) // 2]
            Measured(median, costs_of(steps), stats.compile_seconds).save(self._path)
        if step == self._last:
            raise SystemExit(0)
