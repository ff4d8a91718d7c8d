"""The window whose calls are replayed: one launch each, and a little bookkeeping.

What graphs have left of a window is taken up where something else comes next: its gradients are copied out of the
graphs' memory, and the window goes on as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zeroweave._torch.autograd import keeps_graph
from zeroweave._torch.modes import unseen
from zeroweave.engine.graphs.again import Again
from zeroweave.engine.graphs.around import Modes
from zeroweave.engine.graphs.batch import Batch
from zeroweave.engine.graphs.capturer import Capturer
from zeroweave.engine.graphs.edge import TWICE, go_on, waiting
from zeroweave.engine.graphs.known import fits
from zeroweave.engine.graphs.loop import Loop
from zeroweave.engine.graphs.parts import CapturedWindow, Part, gradients_key, zeros_for
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.errors import EngineError
from zeroweave.optim.scaler import Scalars, Scaler


class Opened:
    """The window of one engine that is open, if its calls are replayed."""

    def __init__(
        self,
        parts: EngineParts,
        loop: Loop,
        window: Window,
        step: OptimizerStep,
        scaler: Scaler,
        scalars: Scalars,
        scheduler: Scheduler,
        capturer: Capturer,
    ) -> None:
        self._parts, self._loop, self._window, self._step = parts, loop, window, step
        self._scaler, self._scalars, self._scheduler, self._capturer = scaler, scalars, scheduler, capturer
        self._modules = tuple(parts.model.modules())
        self.replayed = 0
        """micro-steps that were"""
        self._captured: CapturedWindow | None = None
        """whose calls are replayed, while they are"""
        self._at = 0
        """so many of them were"""
        self._since: tuple[int, int] | None = None
        """when the first one was: see `_now`"""
        self._out = False
        """do the accounts have what those have left? Then the window goes on as ever"""
        self._gathered = False
        """have buckets what those have gathered?"""
        self._forwards = 0
        """forwards that were replayed; the last one's activations are there"""
        self._awaited: Part | None = None
        """the backward of the last one, while it is to come"""
        self._again: Again | None = None
        """what it takes to run the last one once more"""
        self._roots: list[torch.Tensor] | None = None
        """what has come of that, if it was: the outputs that a backward goes on from"""

    @property
    def awaits(self) -> bool:
        """Is the backward to come of a forward that was replayed?"""
        return self._awaited is not None

    @property
    def ran_again(self) -> bool:
        """Will the next backward go on from a forward that ran once more as ever?"""
        return self._roots is not None

    def begin(self, captured: CapturedWindow | None = None) -> None:
        """A window begins, whose calls can be replayed if it goes on as that one."""
        self._captured, self._at, self._since, self._out, self._gathered = captured, 0, None, False, False

    def end(self) -> None:
        """The window is over."""
        self._captured = self._since = self._awaited = self._again = self._roots = None

    @property
    def lapsed(self) -> bool:
        """Was the window given up, or have parameters changed? Its next call is none of it then."""
        return self._since is not None and self._since != self._now

    @property
    def _changed(self) -> bool:
        """Have parameters other values than in the replays?"""
        return self._since is not None and self._since[1] != self._now[1]

    def why_not(self, key: object) -> str | None:
        """Why its next call, which has this key, cannot be replayed; None if it can."""
        # What modules have computed by themselves, as in engine.module.part(x), no graph knows.
        if self._out or self._awaited is not None or len(self._parts.runtime.replay.record):
            return "something else was done in the window"
        stands = self._parts.runtime.replay.lingering.stand
        captured = self._captured
        if captured is None or not (captured.holds and stands(captured.schedule.stays)):
            return "what its graphs read has changed"
        return None if fits(self._captured, self._at, key) else "the window goes on as none that was captured"

    # ------------------------------------------------------------------ replays
    def replay(self, tensors: Sequence[torch.Tensor] = ()) -> Part:
        """The next call, with these."""
        captured, optimizer = self._captured, self._parts.optimizer
        assert captured is not None and optimizer is not None and optimizer.rates is not None
        part = captured.parts[self._at]
        if self._at == 0:
            self._since = self._now
            self._parts.runtime.unseat()
            self._parts.runtime.replay.lingering.wait()
            self._scalars.take(self._scaler.loss_scale.value)
        if part.left is None:
            optimizer.rates.take()
        part.replay(tensors)
        self._parts.progress.ledger.again(part.collectives)
        self._at += 1
        return part

    def forward(self, given: Batch) -> Any:
        """The next call, a forward; what it returns."""
        captured = self._captured
        assert captured is not None
        self._again = Again(given, self._capturer, captured.buffers, Modes(self._modules, self._parts.device))
        self._roots = None
        part = self.replay(given.tensors)
        self._forwards += 1
        self._awaited = captured.parts[self._at]
        return part.outputs.of(waiting(part.results(), part.trained, partial(self._backward, self._forwards)))

    def run_again(self) -> None:
        """The last forward, as ever, because its backward is no part of the window any more.

        On all ranks, or where stages 1 and 2 have shown what the graphs have gathered. Not with other parameters.
        """
        if self._changed:
            return
        captured, again = self._captured, self._again
        assert captured is not None and again is not None
        self.go_on_as_ever()
        outputs = again.run(self._loop, self._capturer, captured.parts[self._at - 1].inputs)
        self._roots, self._awaited = [outputs.tensors[index] for index in outputs.trained], None

    def backward_of_nothing(self) -> None:
        """The backward of the last forward, where no gradient comes to it on this rank."""
        if self._awaited is not None:
            self._backward(self._forwards, zeros_for(self._awaited))

    def _backward(self, forward: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients have come for the outputs of a forward, by its number. On any thread."""
        captured, part = self._captured, self._awaited
        if forward != self._forwards or captured is None:
            raise EngineError("a backward of a forward whose window is over: call it before the next window's forward")
        if self._changed:
            raise EngineError("a backward of a forward whose parameters were written since then: call it before")
        if self._roots is not None:
            go_on(self._roots, gradients, self._window.backward_from)
            return
        if part is None:
            raise RuntimeError(TWICE)
        if keeps_graph():
            raise EngineError("loss.backward(retain_graph=True) of a step that was captured: use engine.backward")
        if part.kind != "backward" or ("backward", gradients_key(gradients)) != part.key:
            raise EngineError(
                "a backward has gradients of other outputs of the model than in the steps that were captured: use the "
                "same outputs in each step's loss, or set compile.cuda_graphs to false"
            )
        before = captured.parts[self._at - 1].left if self._at > 1 else None
        if self._out and before is not None:
            before.put_back(self._parts.runtime.gradients, self._scaler)
        self._awaited = None
        self.replay([gradient for gradient in gradients if gradient is not None])
        if self._out:
            assert part.left is not None
            part.left.take_up(self._parts.runtime.gradients, self._scaler)
            self._scheduler.unrecorded()
        self._window.backward_replayed()

    def reduce(self) -> None:
        """The next call, the end of a coalesced block."""
        assert self._captured is not None
        left = self._captured.parts[self._at - 1].left
        self.replay()
        if left is not None and left.unreduced:
            self._window.reduced()

    def micro_step_ended(self, boundary: bool) -> None:
        """The last call was the end of a micro-step, and of the window if that was its `boundary`."""
        captured = self._captured
        assert captured is not None
        self.replayed += 1
        if boundary:
            self.end()
            nonfinite = self._scaler.checks and bool(self._scalars.found.item())
            if captured.norm is not None and not nonfinite:
                self._scaler.found_norm(captured.norm.clone())
            self._step.replayed(captured.executed, nonfinite)
        else:
            self._step.none_applied()
            self._parts.stubs.gradients_wait()
        self._window.micro_step_ended(boundary)

    @property
    def _now(self) -> tuple[int, int]:
        """Changes where windows are given up, and with the values of parameters."""
        return self._window.aborted, sum(bucket.generation for bucket in self._parts.runtime.buckets.values())

    def show_gathered(self) -> None:
        """Buckets that the stage keeps have what graphs have gathered in the open window: copies. Sends nothing.

        Without graphs they would be held by now, and no rank that computes alone would gather them. Until the end of
        the window, unless parameters have changed.
        """
        if self._captured is None or not self._at or self._gathered or self._changed:
            return
        if (left := self._captured.parts[self._at - 1].left) is not None:
            with unseen():
                self._parts.runtime.replay.executor.take_up(left.gathered())
        self._gathered = True

    def go_on_as_ever(self) -> None:
        """The accounts have what graphs have left of the open window, from now on."""
        if self._captured is None or self._out:
            return
        self._out = True
        if self._at:
            self._scheduler.unrecorded()
        if self._at and (left := self._captured.parts[self._at - 1].left) is not None:
            left.take_up(self._parts.runtime.gradients, self._scaler)
