"""Measured steps for `zeroweave schedule` and `zeroweave report`, where the environment asks an engine for them.

`ZEROWEAVE_SCHEDULE_OUT` names a folder, and each rank writes `rank<r>.json` there. `ZEROWEAVE_SCHEDULE_STEPS` is the
number of optimizer steps after which the script is left, as by `sys.exit()`; without it the script runs to its end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import TypeAdapter, ValidationError

from zeroweave.engine.context import EngineContext
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.stats import Stats
from zeroweave.engine.step import OptimizerStep
from zeroweave.errors import EngineError, ScheduleError, first_problem
from zeroweave.layout import BucketLayout
from zeroweave.schedule import Measured, Step, costs_of

FOLDER: Final = "ZEROWEAVE_SCHEDULE_OUT"
STEPS: Final = "ZEROWEAVE_SCHEDULE_STEPS"
_MOST: Final = 9
_LONGEST: Final = 1000


@dataclass(frozen=True)
class About:
    """What an engine tells about itself and its run, besides the times of its steps.

    model: its class. device: what this rank computes on. config: as `Config.model_dump` has it. seconds: the number of
    each timed step, from 1, and how long it took. losses: the number of each step, and the loss that its gradients are
    of on this rank, where `backward`, `scale` or `train_step` knows it. Of both the last thousand; skipped steps count.
    """

    rank: int
    world: int
    model: str
    device: str
    versions: dict[str, str]
    config: dict[str, Any]
    buckets: tuple[BucketLayout, ...]
    stats: Stats
    seconds: tuple[tuple[int, float], ...]
    losses: tuple[tuple[int, float], ...]

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return _ABOUT.dump_python(self, mode="json")

    @classmethod
    def found(cls, told: dict[str, Any], name: str) -> About:
        """From what `told` gave; ScheduleError with the field and `name`, of the file, for what is something else."""
        try:
            return _ABOUT.validate_python(told)
        except ValidationError as error:
            problem = first_problem(error, "measured.about")
            raise ScheduleError(f"[ZW703] {name}: not written by this version of zeroweave: {problem}") from None


_ABOUT: Final = TypeAdapter(About)


class Samples:
    """Times every step of one engine and keeps some in a file: of the last steps that followed the present schedule,
    nine at most, those of median, least and greatest duration.
    """

    def __init__(
        self,
        context: EngineContext,
        scheduler: Scheduler,
        step: OptimizerStep,
        stats: Callable[[], Stats],
        path: Path,
        last: int | None,
    ) -> None:
        self._context, self._step, self._stats, self._path, self._last = context, step, stats, path, last
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_LONGEST)
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LONGEST)
        self._newest: Step | None = None
        """the last one that is in the file"""
        self._open = ExitStack()  # as long as the engine lives
        self._recording = self._open.enter_context(scheduler.record())

    @classmethod
    def asked_for(
        cls,
        context: EngineContext,
        scheduler: Scheduler,
        step: OptimizerStep,
        stats: Callable[[], Stats],
        environment: Mapping[str, str] = os.environ,
    ) -> Samples | None:
        """None where `environment` asks for none. EngineError for a folder that cannot be made, or for steps
        that are no number.

        `stats` reads the engine's.
        """
        folder, last = environment.get(FOLDER), environment.get(STEPS)
        if not folder:
            return None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{FOLDER} must name a folder; {folder!r}: {error.strerror}") from None
        if last is not None and not last.isdecimal():
            raise EngineError(f"{STEPS} must be a whole number, not {last!r}")
        path = Path(folder) / f"rank{context.control.rank}.json"
        return cls(context, scheduler, step, stats, path, None if last is None else int(last))

    def step_ended(self, loss: torch.Tensor | None) -> None:
        """After each optimizer step. `loss`: what its gradients are of on this rank, None: unknown."""
        number, steps = self._context.progress.step, self._recording.steps
        if loss is not None:
            self._losses.append((number, float(loss)))
        if steps:
            if steps[-1] is not self._newest:
                self._newest = steps[-1]
                self._seconds.append((number, self._newest.seconds))
            steps[:] = [each for each in steps if each.schedule is steps[-1].schedule][-_MOST:]
            about = About(
                **self._context.described,
                rank=self._context.control.rank,
                buckets=tuple(bucket.layout for bucket in self._context.runtime.buckets.values()),
                stats=self._stats(),
                seconds=tuple(self._seconds),
                losses=tuple(self._losses),
            )
            _measured(steps, about).save(self._path)
        if number - self._step.skipped == self._last:
            raise SystemExit(0)


def _measured(steps: list[Step], about: About) -> Measured:
    ordered = sorted(steps, key=lambda each: each.seconds)
    middle = len(ordered) // 2
    others = tuple(ordered[index] for index in sorted({0, len(ordered) - 1} - {middle}))
    return Measured(ordered[middle], costs_of(steps), about.stats.compile_seconds, others, about.told())
