"""The optimizer step at the end of a window: clipped, skipped or applied, and what comes with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.engine.agreements import Found
from zeroweave.engine.context import EngineContext
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.window import Window
from zeroweave.errors import NonFiniteError, listed
from zeroweave.optim.adaptive import Adaptive
from zeroweave.optim.options import Options, numbers_of, shared_options
from zeroweave.optim.scaler import Scaler
from zeroweave.schedule import Instruction, Schedule


class OptimizerStep:
    """The optimizer steps of one engine.

    `adaptive` decides where the optimizer's states live; None: the config does. `lr_scheduler`: moved by each step
    that is applied.
    """

    def __init__(
        self,
        context: EngineContext,
        window: Window,
        scaler: Scaler,
        scheduler: Scheduler,
        shown: ParameterVisibility,
        adaptive: Adaptive | None,
        lr_scheduler: Any,
    ) -> None:
        self._context, self._config, self._runtime = context, context.config, context.runtime
        self._window, self.scaler, self._scheduler, self._shown = window, scaler, scheduler, shown
        self._adaptive, self.lr_scheduler = adaptive, lr_scheduler
        self.applied = False
        """true if the last `step()` ran the optimizer"""
        self.skipped = 0
        """steps that did not, because gradients were not finite"""
        self.executed: tuple[Instruction, ...] = ()
        """the instructions of the last one"""
        self.traffic = context.progress.ledger.step()
        """what the last one and its window have sent; at first, what `initialize` has"""
        context.progress.ledger.begin_step()

    def remember(self) -> Callable[[], None]:
        """Returns a function that restores what steps change, here and in the scaler."""
        now, scaler_back = (self.skipped, self.applied, self.executed), self.scaler.remember()

        def back() -> None:
            self.skipped, self.applied, self.executed = now
            scaler_back()

        return back

    def resume(self, skipped: int, scale: Mapping[str, float]) -> None:
        """Continues after that many skipped steps, with a loss scale."""
        self.skipped = skipped
        self.scaler.loss_scale.resume(scale)

    def clip(self, max_norm: float) -> torch.Tensor:
        """See `Engine.clip_grad_norm_`."""
        with self._context.guard("clip_grad_norm_"):
            self._window.reduce_rest("clip_grad_norm_()")
            return self.scaler.clip(max_norm)

    @property
    def norm(self) -> float | None:
        """The global 2-norm that the last clipping found, before it; None if nothing was clipped yet."""
        return None if self.scaler.norm is None else float(self.scaler.norm)

    # ------------------------------------------------------------------ one step
    def take(self, boundary: bool) -> None:
        """The end of a micro-step; at the boundary the optimizer step, unless it is skipped."""
        self.applied = False
        if not boundary:
            return
        followed = self._arrive()
        candidate = self._scheduler.candidate(followed)
        found = self._agree(candidate)
        if (departure := self._runtime.replay.departure) is not None:
            self._context.journal.tell("departed", departure)
        gradients = self._runtime.gradients
        absent = gradients.absent(found.had_gradient)
        applies = self._may_apply(found.decision.nonfinite)
        if applies:
            self._update(absent)
        else:
            self._runtime.replay.finish(self._give_up, frozenset(absent))
        self.executed = tuple(self._runtime.replay.executed)
        self._begin_next(candidate, found, applies)
        self.applied = applies

    def _arrive(self) -> bool:
        """Ends the window's computations and reductions. True if they followed the schedule."""
        self._runtime.note_backward()  # an unfinished backward is an error
        self._runtime.reduce_rest()
        replay = self._runtime.replay
        followed = replay.arrive()
        self._shown.close()
        if not followed:
            needed = replay.record.needed()
            if not replay.keeps_all:  # else ranks may compute different things, and each records its own
                needed = self._context.agreements.union("what the backwards needed", needed)
            replay.record.prune(needed)
        return followed

    def _agree(self, candidate: Schedule) -> Found:
        """What the ranks know of the step together, once no gradient is late."""
        gradients, lingering, scaler = self._runtime.gradients, self._runtime.replay.lingering, self.scaler
        while True:
            found = self._context.agreements.step(
                gradients.had_gradient(),
                gradients.late(),
                lingering.viewed(),
                candidate,
                self._options,
                lambda: scaler.checks and scaler.nonfinite(),
            )
            if not (late := gradients.marked(found.late)):
                return found
            self._runtime.replay.reduce_late(late)

    def _options(self) -> Options:
        """By which this rank would update at the end of the present window, as they are now."""
        optimizer = self._context.optimizer
        found = {} if optimizer is None else shared_options(optimizer.optimizer, optimizer.shared)
        return {**found, "'max_norm' of clip_grad_norm_": numbers_of(self.scaler.limits)}

    def _update(self, absent: dict[int, frozenset[int]]) -> None:
        """`absent`: for each trained bucket the slots that no rank had a gradient for."""
        optimizer = self._context.optimizer
        assert optimizer is not None  # `Window.ends` refuses else
        replay, updates = self._runtime.replay, frozenset(absent)
        if self._config.gradient_clipping is not None:
            self.scaler.clip(self._config.gradient_clipping)
        update = optimizer.in_turn(self.scaler.take, absent, replay.update_order(updates))
        try:
            replay.finish(update, updates)
        finally:
            for bucket in absent:
                self._runtime.buckets[bucket].renew()

    def _give_up(self, buckets: Sequence[int]) -> None:
        """Nothing is done with the gradients of these buckets."""
        for bucket in buckets:
            self._runtime.gradients.take(bucket)

    def _begin_next(self, candidate: Schedule, found: Found, applied: bool) -> None:
        """The window is over, and another begins."""
        runtime, context = self._runtime, self._context
        runtime.next_window(self._scheduler.next(candidate, found.decision, applied))
        runtime.release_kept()
        if applied:
            torch.clear_autocast_cache()  # an autocast around several steps has kept casts of what parameters were
            runtime.replay.lingering.rewrite(found.viewed)
        self.scaler.next_window(stepped=applied)
        if self._adaptive is not None and applied and not context.transport.skips:
            self._adaptive.step_ended(self._scheduler.settled)
        context.stubs.gradients_gone()
        context.progress.step_ended()
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self._config.gather_after_step:
            self._shown.open()
        if not context.transport.skips:
            self.traffic = context.progress.ledger.step()
            context.progress.ledger.begin_step()

    # ------------------------------------------------------------------ steps that are skipped
    def _may_apply(self, nonfinite: bool) -> bool:
        """True if the optimizer step takes place. Else counts, logs and adapts the loss scale.

        `nonfinite`: some rank's gradients are not finite; the same on all ranks. NonFiniteError where that is asked
        for, and a lower loss scale would not help.
        """
        scale = self.scaler.loss_scale
        if not nonfinite:
            return True
        if self._config.on_nonfinite == "raise" and scale.at_minimum:
            raise NonFiniteError(self._describe())
        before = scale.value
        scale.update(overflow=True)
        self.skipped += 1
        scales = f"the loss scale was {before:g} and is {scale.value:g}; " if scale.dynamic else ""
        self._context.journal.tell(
            "skipped",
            f"optimizer step {self._context.progress.step} skipped, because gradients are infinite or NaN; {scales}"
            f"{self.skipped} skipped so far",
            logging.WARNING,
        )
        return False

    def _describe(self) -> str:
        """Collective."""
        here = [
            bucket.layout.keys(slot.name)[bucket.number]
            for bucket in self._runtime.buckets.values()
            if (shard := self._runtime.gradients.shard(bucket.id)) is not None
            for index, slot in enumerate(bucket.layout.slots)
            if not bucket.fragment(shard, index).isfinite().all()
        ]
        ranks = self._context.control.all_gather_object(here, "which gradients are not finite")
        names = sorted({name for names in ranks for name in names})
        return (
            f"step {self._context.progress.step}: the gradients of {listed([*map(repr, names)])} are infinite or NaN; "
            "nothing was written. Call engine.zero_grad() to go on without this step"
        )
