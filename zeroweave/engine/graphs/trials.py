"""The trial of one engine: what the calls of its window tell it, and what comes of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zeroweave._torch.autograd import keeps_graph
from zeroweave._torch.storages import use_count
from zeroweave.engine.graphs.batch import Batch
from zeroweave.engine.graphs.edge import go_on, waiting
from zeroweave.engine.graphs.judge import Verdict, compared
from zeroweave.engine.graphs.known import Known
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.graphs.parts import Kind, Outputs, gradients_key
from zeroweave.engine.graphs.trial import Bench, Trial
from zeroweave.engine.scheduler import Scheduler


class Trials:
    """At most one is on. What comes of it goes to `known`."""

    def __init__(self, bench: Bench, scheduler: Scheduler, known: Known) -> None:
        self._bench, self._scheduler, self._known, self._parts = bench, scheduler, known, bench.parts
        self._trial: Trial | None = None
        self._spoilt: str | None = None
        """why it tells nothing"""
        self._aborted = 0
        """windows that had been given up when it began"""
        self.seconds = 0.0
        """what trials took so far beside the windows that they tried: copies, captures, comparisons"""

    @property
    def on(self) -> bool:
        """Is one? Not any more if its window was given up, on all ranks."""
        if self._trial is not None and self._bench.window.aborted != self._aborted:
            self._trial.forget()
            self.drop()
        return self._trial is not None

    def begin(self) -> None:
        """The window that begins is tried. On all ranks."""
        began, self._aborted = time.perf_counter(), self._bench.window.aborted
        assert self._scheduler.schedule is not None
        self._parts.runtime.release_kept()
        self._scheduler.uncounted()
        self._trial, self._spoilt = Trial(self._bench, self._scheduler.schedule), None
        try:
            self._trial.begin()
        except (Uncapturable, RuntimeError) as error:  # on this rank, which tells the others behind the window
            self.spoil(str(error))
        self.seconds += time.perf_counter() - began

    def spoil(self, why: str) -> None:
        """On this rank, for now."""
        self._spoilt = self._spoilt or why

    def drop(self) -> None:
        """There is none."""
        self._trial = None

    # ------------------------------------------------------------------ the calls of its window
    def note(self, kind: Kind, key: object, given: Batch | None = None, **more: Any) -> None:
        """A call is about to be made. `key`: None where no graph can serve it; `more`: see `Taken`."""
        if not self.on:
            return
        assert self._trial is not None
        if self._trial.taken and self._trial.taken[-1].kind == "forward":
            self.spoil("a forward of it has no backward")
        if key is None:
            self.spoil("no graph can serve one of its calls")
        else:
            self._trial.add(kind, key, () if given is None else given.copies(), batch=given, **more)

    def returned(self, *tensors: torch.Tensor) -> None:
        """It was made, and has returned these."""
        if self._trial is not None and self._spoilt is None:
            try:
                self._trial.returned(tensors)
            except Uncapturable as error:
                self.spoil(str(error))

    def apart(self, result: Any) -> Any:
        """What a forward has returned, without its way back: a backward comes to `_backward`, and goes on from there.

        So the program, which may keep its loss, keeps no node of the model's graph: nodes belong to the stream on which
        they were made, and one of these could not be captured.
        """
        if self._trial is None:
            return result
        if (name := self._trial.setting.leads_back) is not None:
            self.spoil(f"{name} leads back into the model, and a loss that takes it would: return it from the model")
            return result
        try:
            outputs = Outputs(result)
        except Uncapturable as error:
            self.spoil(str(error))
            return result
        self.returned(*outputs.tensors)
        trained = outputs.trained
        roots = [outputs.tensors[index] for index in trained]
        return outputs.of(waiting(outputs.detached().tensors, trained, partial(self._backward, roots)))

    def _backward(self, roots: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients have come for the outputs of a forward."""
        window = self._bench.window
        if self._trial is not None:
            if not self._trial.taken or self._trial.taken[-1].kind != "forward" or keeps_graph():
                self.spoil("its loop is not forward, backward, step")
            elif self._trial.taken[-1].defers != window.defers or self._trial.taken[-1].ends != window.is_boundary():
                self.spoil("between a forward and its backward it is decided anew when gradients are reduced")
            which = [index for index, gradient in enumerate(gradients) if gradient is not None]
            copies = [gradient.clone() for gradient in gradients if gradient is not None]
            self._trial.add("backward", ("backward", gradients_key(gradients)), copies, which=which)
        go_on(roots, gradients, window.backward_from)

    # ------------------------------------------------------------------ its end
    def end(self) -> None:
        """The window is over. Collective where a trial is on."""
        trial, self._trial = self._trial if self.on else None, None
        if trial is None:
            return
        began = time.perf_counter()
        with self._parts.guard("the capture of a step"):
            try:
                self._judge(trial)
            finally:
                trial.forget()
                self.seconds += time.perf_counter() - began

    def _judge(self, trial: Trial) -> None:
        """Are its graphs to be used? Collective."""
        first = trial.taken[0].key if trial.taken else None
        if (why := self._any_reason(self._why_spoilt(trial))) is not None:
            self._known.spoilt(first, why)
            return
        if all(self._parts.control.all_gather_object(trial.changed_nothing, "the capture of a step")):
            # It was skipped, or at a rate of 0: graphs could not be told from others whose gradients are wrong.
            self._known.idle(first)
            return
        window = None
        try:
            window, failed = trial.capture(first=not self._known.windows), None
        except Uncapturable as error:
            failed = str(error)
        verdict = Verdict(self._any_reason(failed), lasts=True)
        if verdict.why is None and window is not None:
            verdict = compared(trial, window, self._any_reason)
        if verdict.why is None and window is not None:
            self._known.add(window)
            return
        refuse = self._known.refuse if verdict.lasts else self._known.spoilt
        refuse(first, str(verdict.why))
        self._forget_lost(trial)

    def _forget_lost(self, trial: Trial) -> None:
        """A capture that fails while it gathers anew what stays has lost that on its rank. Collective."""
        again = [self._parts.runtime.buckets[bucket] for bucket in trial.schedule.regathers]
        if again and self._any_reason(None if all(each.standing for each in again) else "a gather failed") is not None:
            self._parts.runtime.replay.lingering.expire(trial.schedule.regathers)

    def _why_spoilt(self, trial: Trial) -> str | None:
        """Why the window that has just run tells nothing."""
        if self._spoilt is not None:
            return self._spoilt
        if not self._scheduler.settled or self._scheduler.schedule is not trial.schedule:
            return "it did not follow its schedule"
        if not self._bench.step.gradients_alike:
            return "some parameters have gradients on other ranks only"
        if any(self._parts.runtime.replay.lingering.viewed()):
            return "somebody refers to parameters"
        if (name := trial.setting.replaced) is not None:
            return f"the step puts another tensor in the place of {name}: let it write into the one that is there"
        if (name := trial.setting.assigned) is not None:
            return f"{name} is set anew within the step: give it as a tensor"
        if trial.changed_places:
            return "the optimizer has begun to hold something in it"
        if (name := self._in_a_graph()) is not None:
            return f"a graph of an earlier step, with {name!r} in it, is alive: keep loss.detach() instead of loss"
        return None

    def _in_a_graph(self) -> str | None:
        """A parameter that some graph of autograd still leads to; None if there is none.

        The node that stands for it there belongs to the stream on which it was made. A backward that is captured would
        come to it, and on the default stream nothing can be captured.
        """
        gc.collect()
        for bucket in self._parts.runtime.buckets.values():
            for slot, parameter in zip(bucket.layout.slots, bucket.real, strict=True):
                if bucket.layout.trainable and use_count(parameter) > 1:
                    return slot.name
        return None

    def _any_reason(self, why: str | None) -> str | None:
        """The first reason that any rank has; None if none has one. Collective."""
        ranks = self._parts.control.all_gather_object(why, "the capture of a step")
        return next((f"rank {rank}: {theirs}" for rank, theirs in enumerate(ranks) if theirs is not None), None)
