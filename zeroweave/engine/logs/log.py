"""The log of a run, on rank 0: figures every so many optimizer steps, and events with their reasons.

    journal  ->  Log (every rank)  ->  sinks (rank 0): metrics.jsonl, a line on the terminal, TensorBoard, …

Figures are of all ranks, which put them together over the control group, on the host. Only then is a loss read,
which waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroweave.comm.wrappers import Wire
from zeroweave.config import Config
from zeroweave.engine.context import EngineContext
from zeroweave.engine.logs.sinks import CURVES, Sink, Values, json_lines
from zeroweave.engine.samples import Samples
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.step import OptimizerStep
from zeroweave.errors import ConfigError
from zeroweave.notices import on_stderr, warn
from zeroweave.schedule import Schedule, simulate


def is_asked_for(config: Config) -> bool:
    """True if anything goes anywhere."""
    return config.log_dir is not None or config.log.progress or bool(config.log.to)


def refuse_missing(config: Config) -> None:
    """ConfigError for a library of `log.to` that is not installed."""
    if missing := [name for name in config.log.to if find_spec(name) is None]:
        raise ConfigError(f"[ZW107] log.to: not installed: {', '.join(missing)}; pip install {' '.join(missing)}")


def sinks_of(config: Config, ends: ExitStack) -> list[Sink]:
    """The sinks, for rank 0; `ends` closes each. ConfigError where `log_dir` cannot be written."""
    sinks: list[Sink] = []
    folder = None if config.log_dir is None else Path(config.log_dir)

    def add(sink: Sink) -> None:
        sinks.append(sink)
        ends.callback(sink.close)

    if folder is not None:
        try:
            add(json_lines(folder))
        except OSError as error:
            raise ConfigError(f"[ZW107] log_dir {config.log_dir!r} cannot be written: {error}") from error
    for name in config.log.to:
        add(CURVES[name](folder))
    if config.log.progress:
        from zeroweave.engine.logs.terminal import Terminal

        shown = Terminal(on_stderr(), config.log.steps)
        add(Sink("the terminal", shown.tell, shown.close))
    return sinks


class _Share(NamedTuple):
    """What a rank adds: the mean of its losses, None without one; its tokens, the peak of its memory, its events."""

    loss: float | None
    tokens: int
    memory: int
    events: tuple[Values, ...]


class Log:
    """The log of one engine. `sinks`: where it goes; none on ranks other than 0."""

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, step: OptimizerStep, sinks: Sequence[Sink]
    ) -> None:
        self._context, self._scheduler, self._step, self._sinks = context, scheduler, step, list(sinks)
        self._every, self._told = context.config.log.every, False
        self._exposed: tuple[Schedule | None, float] = None, 0.0
        """the schedule that was looked at last, and what `_exposed_seconds` found"""
        # Since the last figures:
        self._began = time.perf_counter()
        self._steps = self._tokens = 0
        self._losses: list[torch.Tensor] = []
        self._events: list[Values] = []
        about = {**context.described, "gathers": str(context.gathers)}
        self._to_sinks("run", about)

    def step_ended(self, loss: torch.Tensor | None, tokens: int) -> None:
        """After each optimizer step, also one that was skipped. Collective."""
        self._steps += 1
        self._tokens += tokens
        if loss is not None:
            self._losses.append(loss)
        number = self._context.progress.step
        self._note_events(number)
        self._to_sinks("step", {"step": number})
        if not self._told or number % self._every == 0:
            self._tell(number)

    def close(self) -> None:
        """The figures of the last steps. Collective; nothing is told afterwards."""
        self._note_events(self._context.progress.step)
        if self._steps or self._events:
            self._tell(self._context.progress.step)

    def _note_events(self, step: int) -> None:
        for event in self._context.journal.take():
            rank = self._context.control.rank
            self._happened({"step": step, "rank": rank, "event": event.kind, "reason": event.reason})

    def _happened(self, event: Values) -> None:
        self._events.append(event)
        self._to_sinks("event", event)

    def _to_sinks(self, kind: str, values: Values) -> None:
        """A sink that fails, because a disk is full or a server gone, is told nothing more. The run continues."""
        for sink in tuple(self._sinks):
            try:
                sink.tell(kind, values)
            except Exception as error:
                self._sinks.remove(sink)
                warn(
                    f"the log goes to {sink.name} no more: {type(error).__name__}: {error}", self._context.control.rank
                )

    # ------------------------------------------------------------------ figures
    def _tell(self, number: int) -> None:
        with self._context.guard("step"):
            loss = float(torch.stack(self._losses).mean()) if self._losses else None
            mine = _Share(loss, self._tokens, self._context.transport.clock.peak(), tuple(self._events))
            shares: list[_Share] = self._context.control.all_gather_object(mine, "the log")
        seconds = time.perf_counter() - self._began
        if self._sinks:
            self._tell_others(shares)
            self._to_sinks("figures", self._figures(number, seconds, shares))
        self._told, self._began = True, time.perf_counter()
        self._steps = self._tokens = 0
        self._losses, self._events = [], []

    def _tell_others(self, shares: Sequence[_Share]) -> None:
        """What happened on other ranks and not here."""
        known = [{**each, "rank": None} for each in shares[0].events]
        for each in (each for share in shares[1:] for each in share.events):
            if (alike := {**each, "rank": None}) not in known:
                known.append(alike)
                self._happened(each)

    def _figures(self, number: int, seconds: float, shares: Sequence[_Share]) -> Values:
        """How the steps since the last figures went, on all ranks together. What is not known is None.

        step: optimizer steps so far, with those that were skipped. loss: what the gradients of a step are of, where
        `engine.backward`, `engine.scale` or `engine.train_step` knows it: the mean over steps and ranks. seconds: of
        one step on the wall clock, with all that the program did between steps. memory: bytes of device memory that
        were allocated at most, on the rank with most. exposed: seconds of a step in which computation waits for
        collectives, as predicted from what its schedule's instructions have cost. gradient_norm: before the last
        clipping. skipped: steps so far.
        """
        losses = [share.loss for share in shares if share.loss is not None]
        tokens, steps = sum(share.tokens for share in shares), max(self._steps, 1)
        optimizer = self._context.optimizer
        assert optimizer is not None  # there are steps
        return {
            "step": number,
            "loss": sum(losses) / len(losses) if losses else None,
            "seconds": seconds / steps,
            "tokens_per_second": tokens / seconds if tokens else None,
            "memory": max(share.memory for share in shares) or None,
            "exposed": self._exposed_seconds(),
            "learning_rates": [_number(group.get("lr")) for group in optimizer.optimizer.param_groups],
            "loss_scale": self._step.scaler.loss_scale.value,
            "gradient_norm": self._step.norm,
            "skipped": self._step.skipped,
        }

    def _exposed_seconds(self) -> float | None:
        """What computation waits for collectives in a step of the present schedule; None before costs are known."""
        schedule = self._scheduler.schedule
        if schedule is None or schedule.costs is None:
            return None
        if self._exposed[0] is not schedule:
            self._exposed = schedule, math.fsum(simulate(schedule, schedule.costs).waits.values())
        return self._exposed[1]


def _number(rate: Any) -> float | None:
    return float(rate) if isinstance(rate, int | float | torch.Tensor) else None


class AfterStep:
    """Tells the log and the samples of one engine about its steps. None where they were not asked for."""

    def __init__(self, transport: Wire, log: Log | None, samples: Samples | None) -> None:
        self._transport, self._log, self._samples = transport, log, samples
        self._losses: list[torch.Tensor] = []
        """of the open window, unscaled"""
        self._tokens = 0
        """of the open window"""

    @property
    def _look(self) -> bool:
        """True if the log or the samples need the present micro-step."""
        return (self._log is not None or self._samples is not None) and not self._transport.skips

    def batch(self, training: bool, *batch: Any) -> None:
        """The module is called with this."""
        if training and self._look:
            self._tokens += tokens_of(batch)

    def loss(self, loss: torch.Tensor, divisor: int) -> None:
        """A loss, unscaled, and what it is divided by where it is differentiated. Waits for no device.

        What it becomes later does not matter.
        """
        if self._look:
            kind = torch.promote_types(loss.dtype, torch.float32)
            self._losses.append(loss.detach().mean(dtype=kind) / divisor)  # a copy: graphs write theirs again

    def window_ended(self) -> None:
        """The window is over, or was given up: nothing of it counts any more."""
        self._losses, self._tokens = [], 0

    def step_ended(self, boundary: bool) -> None:
        """After each `step()`; `boundary`: it was an optimizer step, or one that was skipped. Collective."""
        if not (boundary and self._look):
            return
        # The optimizer step's gradients are of this sum.
        loss, tokens = torch.stack(self._losses).sum() if self._losses else None, self._tokens
        self.window_ended()
        if self._log is not None:
            self._log.step_ended(loss, tokens)
        if self._samples is not None:
            self._samples.step_ended(loss)

    def close(self) -> None:
        """The engine ends. Collective."""
        if self._log is not None:
            self._log.close()


def tokens_of(batch: Any) -> int:
    """How many tokens a batch has: the elements of its `input_ids`, or else of its first two-dimensional integers.

    Padding counts. 0 where there is nothing of the kind.
    """
    first = 0
    for name, tensor in _tensors("", batch):
        if name == "input_ids":
            return tensor.numel()
        if not first and tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            first = tensor.numel()
    return first


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    match value:
        case torch.Tensor():
            yield name, value
        case Mapping():
            for key, item in value.items():
                yield from _tensors(str(key), item)
        case list() | tuple():
            for item in value:
                yield from _tensors(name, item)
