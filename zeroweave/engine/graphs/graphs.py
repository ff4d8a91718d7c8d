"""Which calls of a training loop run as graphs. All ranks decide it together, before each.

    PLAIN      as ever: until the schedule has settled, for shapes that are new, and wherever a graph will not do
    TRIAL      a whole window as ever, which is then captured and compared (`trial`)
    REPLAY     a call of a window that was captured: one launch, and a little bookkeeping

A backward is that of the forward before it: where that was replayed, it is, without another agreement. What graphs
have left of a window is taken up where something else comes next: its gradients are copied out of the graphs' memory,
and the window goes on as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zeroweave._torch.autograd import keeps_graph
from zeroweave.engine.agreements import Course
from zeroweave.engine.graphs.again import Again
from zeroweave.engine.graphs.batch import Batch, Modes, Uncapturable, surroundings
from zeroweave.engine.graphs.capturer import Capturer
from zeroweave.engine.graphs.edge import TWICE, go_on, waiting
from zeroweave.engine.graphs.known import Known, fits
from zeroweave.engine.graphs.loop import Loop, LossFunction
from zeroweave.engine.graphs.parts import CapturedWindow, Part, gradients_key, zeros_for
from zeroweave.engine.graphs.trial import Bench
from zeroweave.engine.graphs.trials import Trials
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.errors import EngineError
from zeroweave.optim.scaler import Scalars, Scaler


class Graphs:
    """The graphs of one engine. `capturer`: None where it has none, and `why_not`, if they are wanted all the same.

    The calls are those of `Loop`, which makes them where no graph does.
    """

    def __init__(
        self,
        parts: EngineParts,
        loop: Loop,
        window: Window,
        step: OptimizerStep,
        scaler: Scaler,
        scheduler: Scheduler,
        capturer: Capturer | None,
        why_not: str | None,
    ) -> None:
        self._parts, self._loop, self._window, self._step = parts, loop, window, step
        self._scaler, self._scheduler, self._guard = scaler, scheduler, parts.guard
        self._why_not, self._modules = why_not, tuple(parts.model.modules())
        self.known = Known(why_not, parts.control.rank)
        self.replayed = 0
        """micro-steps that were"""
        self._scalars: Scalars | None = None
        self._trials: Trials | None = None
        self._capturer = capturer
        if capturer is not None:
            self._scalars = Scalars(parts.device)
            bench = Bench(parts, loop, window, step, scaler, self._scalars, capturer)
            self._trials = Trials(bench, scheduler, self.known)
            parts.guard.attach(self._something_begins)
            parts.ends.callback(self.close)
        self._open: CapturedWindow | None = None
        """whose calls are replayed, while they are"""
        self._at = 0
        """so many of them were"""
        self._out = False
        """do the accounts have what those have left? Then the window goes on as ever"""
        self._forwards = 0
        """forwards that were replayed; the last one's activations are there"""
        self._awaited: Part | None = None
        """the backward of the last one, while it is to come"""
        self._again: Again | None = None
        """what it takes to run the last one once more"""
        self._roots: list[torch.Tensor] | None = None
        """what has come of that, if it was: the outputs that a backward goes on from"""
        self._meets = False
        """do the ranks meet before the next call? They do in a window whose first call was replayed"""
        self._mine = False
        """is what begins in the guard a call of the loop?"""

    @property
    def nbytes(self) -> int:
        """Bytes that they have beside tensors."""
        return 0 if self._capturer is None else self._capturer.nbytes

    def close(self) -> None:
        """The graphs end. They must, before the process group does."""
        if self._capturer is not None:
            self._capturer.finish()
        self.known.clear()
        self._over()
        if self._trials is not None:
            self._trials.drop()

    # ------------------------------------------------------------------ the calls
    def train_step(self, batch: Any, loss_fn: LossFunction | None) -> tuple[torch.Tensor, bool]:
        """See `Engine.train_step`. Was it a boundary?"""
        if (trials := self._taking_part()) is None:
            return self._loop.train_step(batch, loss_fn)
        with _Mine(self):
            with self._guard("train_step"):
                boundary = self._window.is_boundary()
                given, key, why = self._look("train_step", batch, loss_fn)
                if self._course(trials, key, why) is Course.REPLAY and given is not None:
                    (loss,) = self._replay(given.tensors).results()
                    self._micro_step_replayed(boundary)
                    return loss, boundary
                trials.note("train_step", key, given, boundary=boundary, loss_fn=loss_fn)
            loss, boundary = self._loop.train_step(batch, loss_fn)
            trials.returned(loss)
            self._micro_step_ran(trials, boundary)
            return loss, boundary

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `Engine.__call__`."""
        with _Mine(self):
            if not torch.is_grad_enabled() or (trials := self._taking_part()) is None:
                return self._loop.forward(args, kwargs)
            with self._guard("forward"):
                given, key, why = self._look("forward", (tuple(args), dict(kwargs)), None)
                if self._course(trials, key, why) is Course.REPLAY and given is not None:
                    return self._replay_forward(given)
                if self._awaited is not None:  # two forwards before a backward: their gradients add up in it
                    self._run_again()
                trials.note("forward", key, given)
            result = self._loop.forward(args, kwargs)
            return result if key is None else trials.apart(result)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """See `Engine.backward`."""
        with _Mine(self):
            if retain_graph and self._awaited is not None:
                with self._guard("backward"):
                    self._run_again()
            on_trial = self._trials is not None and self._trials.on
            apart = on_trial or self._roots is not None
            if not apart and self._awaited is None:
                self._loop.backward(loss, retain_graph, scale_wrt_gas)
                return
            before = self._window.backwards
            with self._guard("backward"):
                self._window.scale(loss, by_steps=scale_wrt_gas).backward(retain_graph=retain_graph)
                if self._window.backwards > before:
                    return
                # The loss reaches no output of the model on this rank, and may on others.
                if (part := self._awaited) is not None:
                    self._replay_backward(self._forwards, zeros_for(part))
            if apart:
                self._loop.backward(torch.zeros((), device=self._parts.device, requires_grad=True))

    def clip(self, max_norm: float) -> torch.Tensor:
        """See `Engine.clip_grad_norm_`."""
        with _Mine(self):
            if (trials := self._trials) is None or not (trials.on or self._meets):
                return self._step.clip(max_norm)
            with self._guard("clip_grad_norm_"):
                key = "clip", max_norm
                if self._course(trials, key) is Course.REPLAY:
                    (norm,) = self._replay([]).results()
                    self._scaler.found_norm(norm)
                    return norm
                trials.note("clip", key, value=max_norm)
            norm = self._step.clip(max_norm)
            trials.returned(norm)
            return norm

    def step(self) -> bool:
        """See `Engine.step`. Was it a boundary?"""
        if (trials := self._trials) is None:
            return self._loop.step()
        with _Mine(self):
            if trials.on or self._meets:
                with self._guard("step"):
                    boundary = self._window.ends()
                    key = "step", boundary
                    if self._course(trials, key) is Course.REPLAY:
                        self._replay([])
                        self._micro_step_replayed(boundary)
                        return boundary
                    trials.note("step", key, boundary=boundary)
            boundary = self._loop.step()
            self._micro_step_ran(trials, boundary)
            return boundary

    def _taking_part(self) -> Trials | None:
        """None where what begins can be no graph, nor become one."""
        if self._why_not is not None:
            self.known.tell(self._why_not)
        return None if self._parts.transport.tries or self._guard.dirty else self._trials

    def enter(self, mine: bool) -> bool:
        """What begins in the guard from now on is a call of the loop, or is not; what it was before."""
        before, self._mine = self._mine, mine
        return before

    def _look(self, kind: str, batch: Any, loss_fn: LossFunction | None) -> tuple[Batch | None, object, str]:
        """The batch as graphs take it, and what is the same for all that one can serve; or why there is none."""
        try:
            given = Batch(batch, self._parts.device)
        except Uncapturable as error:
            return None, None, str(error)
        around = surroundings(self._modules, self._parts.device, loss_fn)
        return given, (kind, given.signature, around, self._window.is_boundary()), ""

    # ------------------------------------------------------------------ how the next one runs
    def _course(self, trials: Trials, key: object, why: str = "") -> Course:
        """How the call that begins runs; `key`: None where no graph can serve it, and why. Collective."""
        if trials.on:
            return Course.TRIAL
        if self._again is not None and self._again.when != self._now:
            self._over()  # nobody can go back to that forward any more
        begins = self._window.begins and self._awaited is None
        if not begins and not self._meets:
            return Course.PLAIN
        if begins:
            self._open, self._at, self._out = None, 0, False
        wish, why = (Course.PLAIN, why) if key is None else self._wish(key, begins)
        course = self._parts.agreements.course(wish, self._scheduler.schedule, self._window.is_boundary())
        self._meets = course is Course.REPLAY
        if not self._meets:
            self._go_on_as_ever()
        if course is Course.PLAIN:
            self.known.tell(why if wish is Course.PLAIN else "another rank has to run it as ever")
        if course is Course.TRIAL:
            trials.begin()
        return course

    def _wish(self, key: object, begins: bool) -> tuple[Course, str]:
        """What this rank would do, and why not more."""
        if not begins:
            # What modules have computed by themselves, as in engine.module.part(x), no graph knows.
            if self._out or self._awaited is not None or len(self._parts.runtime.replay.record):
                return Course.PLAIN, "something else was done in the window"
            if self._open is None or not self._open.whereabouts.hold():
                return Course.PLAIN, "what its graphs read has changed"
            if not fits(self._open, self._at, key):
                return Course.PLAIN, "the window goes on as none that was captured"
            return Course.REPLAY, ""
        if (reason := self._unsettled()) is not None:
            return Course.PLAIN, reason
        self._open, wish, why = self.known.find(key, self._scheduler.schedule)
        return wish, why

    def _unsettled(self) -> str | None:
        """Why the window that begins cannot be a graph, whatever it computes."""
        runtime = self._parts.runtime
        if not self._scheduler.settled or self._scheduler.is_timed:
            return "the schedule has not settled, or is timed"
        if any(runtime.replay.lingering.viewed()):
            return "somebody refers to parameters, which must stay readable"
        if self._parts.optimizer is None or not self._parts.optimizer.by_bucket:
            return "somebody listens to the optimizer's steps"
        if runtime.replay.executor.staging.busy:
            return "a checkpoint is being saved"
        return None

    # ------------------------------------------------------------------ replays
    def _replay(self, tensors: Sequence[torch.Tensor]) -> Part:
        """The next part of the open window, with these."""
        window, optimizer = self._open, self._parts.optimizer
        assert window is not None and optimizer is not None and optimizer.rates is not None
        part = window.parts[self._at]
        if self._at == 0:
            self._parts.runtime.unseat()
            if self._scalars is not None:
                self._scalars.take(self._scaler.loss_scale.value)
        if part.left is None:
            optimizer.rates.take()
        part.replay(tensors)
        self._parts.progress.ledger.again(part.collectives)
        self._at += 1
        return part

    def _replay_forward(self, given: Batch) -> Any:
        window, capturer = self._open, self._capturer
        assert window is not None and capturer is not None
        self._again = Again(given, capturer, window.buffers, Modes(self._modules, self._parts.device), self._now)
        self._roots = None
        part = self._replay(given.tensors)
        self._forwards += 1
        self._awaited = window.parts[self._at]
        arrive = partial(self._replay_backward, self._forwards)
        return part.outputs.of(waiting(part.results(), part.trained, arrive))

    def _run_again(self) -> None:
        """The last forward, as ever, because its backward is no part of the window any more. On all ranks."""
        window, again, capturer = self._open, self._again, self._capturer
        assert window is not None and again is not None and capturer is not None
        self._go_on_as_ever()
        outputs = again.run(self._loop, capturer, window.parts[self._at - 1].inputs)
        self._roots, self._awaited = [outputs.tensors[index] for index in outputs.trained], None

    def _replay_backward(self, forward: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients have come for the outputs of a forward, by its number. On any thread."""
        window, part = self._open, self._awaited
        if forward != self._forwards or window is None:
            raise EngineError("a backward of a forward whose window is over: call it before the next window's forward")
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
        before = window.parts[self._at - 1].left if self._at > 1 else None
        if self._out and before is not None:
            before.put_back(self._parts.runtime.gradients, self._scaler)
        self._awaited = None
        self._replay([gradient for gradient in gradients if gradient is not None])
        if self._out:
            assert part.left is not None
            part.left.take_up(self._parts.runtime.gradients, self._scaler)
        self._window.backward_replayed()

    def _micro_step_replayed(self, boundary: bool) -> None:
        window, scalars = self._open, self._scalars
        assert window is not None and scalars is not None
        self.replayed += 1
        if boundary:
            self._over()
            nonfinite = self._scaler.checks and bool(scalars.found.item())
            if window.norm is not None and not nonfinite:
                self._scaler.found_norm(window.norm.clone())
            self._step.replayed(window.executed, nonfinite)
        else:
            self._step.none_applied()
            self._parts.stubs.gradients_wait()
        self._window.micro_step_ended(boundary)

    def _micro_step_ran(self, trials: Trials, boundary: bool) -> None:
        """As ever."""
        if boundary:
            self._over()
            trials.end()

    @property
    def _now(self) -> tuple[int, int]:
        """Changes where windows are given up, and with the values of parameters."""
        return self._window.aborted, sum(bucket.generation for bucket in self._parts.runtime.buckets.values())

    def _over(self) -> None:
        """The window is."""
        self._open = self._awaited = self._again = self._roots = None
        self._meets = False

    # ------------------------------------------------------------------ windows that are left
    def _something_begins(self) -> None:
        """Something other than a call of the loop begins: an open window goes on as ever."""
        if not self._mine and not self._parts.transport.tries:
            if self._trials is not None:
                self._trials.spoil("something else was done in it")
            self._go_on_as_ever()

    def _go_on_as_ever(self) -> None:
        """The accounts have what graphs have left of the open window, from now on."""
        if self._open is None or self._out:
            return
        self._out = True
        if self._at:
            self._scheduler.unrecorded()
        if self._at and (left := self._open.parts[self._at - 1].left) is not None:
            left.take_up(self._parts.runtime.gradients, self._scaler)


class _Mine:
    """The scope of a call of the loop."""

    __slots__ = ("_before", "_graphs")

    def __init__(self, graphs: Graphs) -> None:
        self._graphs, self._before = graphs, False

    def __enter__(self) -> None:
        self._before = self._graphs.enter(True)

    def __exit__(self, *_: object) -> None:
        self._graphs.enter(self._before)
