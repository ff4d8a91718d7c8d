"""Which calls of a training loop run as graphs. All ranks decide it together, before each.

    PLAIN      as ever: until the schedule has settled, for shapes that are new, and wherever a graph will not do
    TRIAL      a whole window as ever, which is then captured and compared (`trial`)
    REPLAY     a call of a window that was captured (`opened`)

A backward is that of the forward before it: where that was replayed, it is, without another agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from zeroweave._torch.autograd import current_graph_task
from zeroweave.comm.pending import side_of
from zeroweave.eager.shown import Shown
from zeroweave.engine.agreements import Course
from zeroweave.engine.graphs.around import Surroundings
from zeroweave.engine.graphs.batch import Batch
from zeroweave.engine.graphs.capturer import Capturer
from zeroweave.engine.graphs.known import Known
from zeroweave.engine.graphs.loop import Loop, LossFunction
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.graphs.opened import Opened
from zeroweave.engine.graphs.parts import Kind
from zeroweave.engine.graphs.trial import Bench
from zeroweave.engine.graphs.trials import Trials
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.optim.options import Options, clipping
from zeroweave.optim.scaler import Scalars, Scaler
from zeroweave.ranks.start import at_end


class Graphs:
    """The graphs of one engine. `capturer`: None where it has none, and `why_not`, if they are wanted all the same.

    The calls are those of `Loop`, which makes them where no graph does.
    """

    def __init__(
        self,
        parts: EngineParts,
        shown: Shown,
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
        self._why_not = why_not
        self._surroundings = Surroundings(parts.model, parts.device, parts.places, parts.runtime.buckets.values())
        self.known = Known(why_not, parts.journal)
        self._capturer = capturer
        self._engaged: tuple[Trials, Opened] | None = None
        """what tries windows, and what replays them"""
        if capturer is not None:
            scalars = Scalars(parts.device)
            bench = Bench(parts, loop, window, step, scaler, scalars, capturer, side_of(parts.device))
            opened = Opened(parts, loop, window, step, scaler, scalars, scheduler, capturer)
            self._engaged = Trials(bench, scheduler, self.known), opened
            parts.guard.attach(self._something_begins)
            shown.attach(self._somebody_reads)
            parts.stubs.listen(self._parameters_change)
            own = ExitStack()
            own.callback(self.close)
            control = parts.control
            at_end(parts.ends, own, lambda: control.broken is not None)  # the end of a process group waits for graphs
        self._meets = False
        """do the ranks meet before the next call? They do in a window whose first call was replayed"""
        self._mine = False
        """is what begins in the guard a call of the loop?"""

    @property
    def replayed(self) -> int:
        """Micro-steps that were."""
        return 0 if self._engaged is None else self._engaged[1].replayed

    @property
    def seconds(self) -> float:
        """What captures took so far, with the comparisons and the copies for them."""
        return 0.0 if self._engaged is None else self._engaged[0].seconds

    @property
    def nbytes(self) -> int:
        """Bytes that they have beside tensors."""
        return 0 if self._capturer is None else self._capturer.nbytes

    def close(self) -> None:
        """The graphs end. They must, before the process group does."""
        if self._capturer is not None:
            self._capturer.finish()
        self.known.clear()
        if self._engaged is not None:
            trials, opened = self._engaged
            self._over(opened)
            trials.drop()

    # ------------------------------------------------------------------ the calls
    def train_step(self, batch: Any, loss_fn: LossFunction | None) -> tuple[torch.Tensor, bool]:
        """See `Engine.train_step`. Was it a boundary?"""
        if (engaged := self._taking_part()) is None:
            return self._loop.train_step(batch, loss_fn)
        trials, opened = engaged
        with _Mine(self):
            with self._guard("train_step"):
                boundary = self._window.is_boundary()
                given, key, why = self._look("train_step", batch, loss_fn)
                if self._course("train_step", key, why) is Course.REPLAY and given is not None:
                    (loss,) = opened.replay(given.tensors).results()
                    self._micro_step_replayed(opened, boundary)
                    return loss, boundary
                trials.note("train_step", key, given, boundary=boundary, loss_fn=loss_fn)
            loss, boundary = self._loop.train_step(batch, loss_fn)
            trials.returned(loss)
            self._micro_step_ran(boundary)
            return loss, boundary

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `Engine.__call__`."""
        with _Mine(self):
            if not torch.is_grad_enabled() or (engaged := self._taking_part()) is None:
                return self._loop.forward(args, kwargs)
            trials, opened = engaged
            with self._guard("forward"):
                given, key, why = self._look("forward", (tuple(args), dict(kwargs)), None)
                if self._course("forward", key, why) is Course.REPLAY and given is not None:
                    return opened.forward(given)
                if opened.awaits:  # two forwards before a backward: their gradients add up in it
                    opened.run_again()
                trials.note("forward", key, given)
            result = self._loop.forward(args, kwargs)
            return result if key is None else trials.apart(result)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """See `Engine.backward`."""
        if self._engaged is None:
            self._loop.backward(loss, retain_graph, scale_wrt_gas)
            return
        trials, opened = self._engaged
        with _Mine(self):
            if retain_graph:
                self._run_again("backward")
            apart = trials.on or opened.ran_again
            if not apart and not opened.awaits:
                self._loop.backward(loss, retain_graph, scale_wrt_gas)
                return
            before = self._window.backwards
            with self._guard("backward"):
                self._window.scale(loss, by_steps=scale_wrt_gas).backward(retain_graph=retain_graph)
                if self._window.backwards > before:
                    return
                # The loss reaches no output of the model on this rank, and may on others.
                opened.backward_of_nothing()
            if apart:
                self._loop.backward(torch.zeros((), device=self._parts.device, requires_grad=True))

    def clip(self, max_norm: float) -> torch.Tensor:
        """See `Engine.clip_grad_norm_`."""
        with _Mine(self):
            if (engaged := self._inside()) is None:
                return self._step.clip(max_norm)
            trials, opened = engaged
            with self._guard("clip_grad_norm_"):
                key = "clip", max_norm
                if self._course("clip", key, options=clipping([max_norm])) is Course.REPLAY:
                    (norm,) = opened.replay().results()
                    self._scaler.found_norm(norm)
                    return norm
                trials.note("clip", key, value=max_norm)
            norm = self._step.clip(max_norm)
            trials.returned(norm)
            return norm

    def step(self) -> bool:
        """See `Engine.step`. Was it a boundary?"""
        with _Mine(self):
            if (engaged := self._inside()) is not None:
                trials, opened = engaged
                with self._guard("step"):
                    boundary = self._window.ends()
                    key = "step", boundary
                    if self._course("step", key) is Course.REPLAY:
                        opened.replay()
                        self._micro_step_replayed(opened, boundary)
                        return boundary
                    trials.note("step", key, boundary=boundary)
            boundary = self._loop.step()
            self._micro_step_ran(boundary)
            return boundary

    def set_boundary(self, is_boundary: bool | None) -> None:
        """See `Engine.set_gradient_accumulation_boundary`."""
        before = self._window.is_boundary()
        self._window.set_boundary(is_boundary)
        if self._window.is_boundary() != before:
            with _Mine(self):
                self._run_again("set_gradient_accumulation_boundary")

    # ------------------------------------------------------------------ blocks
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        with ExitStack() as block:
            self._begin_block(block, self._loop.no_sync(), "no_sync")
            yield
        with _Mine(self):
            self._run_again("the end of no_sync")

    @contextmanager
    def coalesce(self) -> Iterator[None]:
        """See `Engine.coalesce_grad_reduction`."""
        with ExitStack() as block:
            self._begin_block(block, self._loop.coalesced(), "coalesce_grad_reduction")
            yield
        self._reduce()

    def _begin_block(self, block: ExitStack, entered: AbstractContextManager[None], place: str) -> None:
        """A block begins. What was captured of a forward before it does not hold for a backward inside."""
        with _Mine(self):
            block.enter_context(entered)
            self._run_again(place)

    def _reduce(self) -> None:
        """The end of a coalesced block."""
        with _Mine(self):
            self._run_again("the end of coalesce_grad_reduction")
            if (engaged := self._inside()) is not None:
                trials, opened = engaged
                with self._guard("the end of coalesce_grad_reduction"):
                    key = ("reduce",)
                    if self._course("reduce", key) is Course.REPLAY:
                        opened.reduce()
                        return
                    trials.note("reduce", key)
            self._loop.reduce()

    def _run_again(self, place: str) -> None:
        """The last forward runs as ever, if it was replayed and its backward is to come."""
        if self._engaged is not None and self._engaged[1].awaits:
            with self._guard(place):
                self._engaged[1].run_again()

    # ------------------------------------------------------------------ how the next one runs
    def _taking_part(self) -> tuple[Trials, Opened] | None:
        """None where what begins can be no graph, nor become one."""
        if self._why_not is not None:
            self.known.tell(self._why_not)
        return None if self._parts.transport.tries or self._guard.dirty else self._engaged

    def _inside(self) -> tuple[Trials, Opened] | None:
        """None unless the window is tried, or its calls so far were replayed."""
        return self._engaged if self._engaged is not None and (self._engaged[0].on or self._meets) else None

    def enter(self, mine: bool) -> bool:
        """What begins in the guard from now on is a call of the loop, or is not; what it was before."""
        before, self._mine = self._mine, mine
        return before

    def _look(self, kind: Kind, batch: Any, loss_fn: LossFunction | None) -> tuple[Batch | None, object, str]:
        """The batch as graphs take it, and what is the same for all that one can serve; or why there is none."""
        try:
            given = Batch(batch, self._parts.device)
        except Uncapturable as error:
            return None, None, str(error)
        around = self._surroundings.now(loss_fn)
        return given, (kind, given.signature, around, self._window.is_boundary(), self._window.defers), ""

    def _course(self, kind: Kind, key: object, why: str = "", options: Options | None = None) -> Course:
        """How the call that begins runs; `key`: None where no graph can serve it, and why. Collective.

        `options`: what all ranks have to have alike; None: those of an update, where the call updates.
        """
        assert self._engaged is not None
        trials, opened = self._engaged
        if trials.on:
            return Course.TRIAL
        if opened.lapsed:
            self._over(opened)
        begins = self._window.begins and not opened.awaits
        if not begins and not self._meets:
            return Course.PLAIN
        if begins:
            opened.begin()
        wish, why = (Course.PLAIN, why) if key is None else self._wish(opened, key, begins)
        ends = self._window.is_boundary()
        call = f"{kind} {ends} {self._window.defers}"
        if options is None:
            options = self._step.options() if ends and kind in ("train_step", "step") else {}
        course = self._parts.agreements.course(wish, self._scheduler.schedule, ends, call, options)
        self._meets = course is Course.REPLAY
        if not self._meets:
            opened.go_on_as_ever()
        if course is Course.PLAIN:
            self.known.tell(why if wish is Course.PLAIN else "another rank has to run it as ever")
        if course is Course.TRIAL:
            trials.begin()
        return course

    def _wish(self, opened: Opened, key: object, begins: bool) -> tuple[Course, str]:
        """What this rank would do, and why not more."""
        if not begins:
            why = opened.why_not(key)
            return (Course.REPLAY, "") if why is None else (Course.PLAIN, why)
        self.known.follow(self._scheduler.schedules)
        if (reason := self._unsettled()) is not None:
            return Course.PLAIN, reason
        captured, wish, why = self.known.find(key, self._scheduler.schedule)
        opened.begin(captured)
        return wish, why

    def _unsettled(self) -> str | None:
        """Why the window that begins cannot be a graph, whatever it computes."""
        runtime = self._parts.runtime
        if any(self._parts.stubs.hooks.values()):
            return "parameters have hooks, which no graph runs"
        if not self._scheduler.settled or self._scheduler.timing.is_on:
            return "the schedule has not settled, or is timed"
        schedule = self._scheduler.schedule
        if schedule is not None and not runtime.replay.lingering.stand(schedule.stays):
            return "what stays gathered has to be gathered first"
        if any(runtime.replay.lingering.viewed()):
            return "somebody refers to parameters, which must stay readable"
        if self._parts.optimizer is None or not self._parts.optimizer.by_bucket:
            return "somebody listens to the optimizer's steps"
        if runtime.replay.executor.staging.busy:
            return "a checkpoint is being saved"
        return None

    # ------------------------------------------------------------------ the ends of windows
    def _micro_step_replayed(self, opened: Opened, boundary: bool) -> None:
        if boundary:
            self._meets = False
        opened.micro_step_ended(boundary)

    def _micro_step_ran(self, boundary: bool) -> None:
        """As ever."""
        if boundary and self._engaged is not None:
            trials, opened = self._engaged
            self._over(opened)
            trials.end()

    def _over(self, opened: Opened) -> None:
        """The window is over."""
        opened.end()
        self._meets = False

    def _something_begins(self) -> None:
        """Something other than a call of the loop begins: an open window goes on as ever."""
        if not self._mine and not self._parts.transport.tries and self._engaged is not None:
            trials, opened = self._engaged
            trials.spoil("something else was done in it")
            opened.go_on_as_ever()

    def _parameters_change(self) -> None:
        """The program sets `requires_grad`, or hooks: what was replayed does not know of that."""
        self._something_begins()
        with _Mine(self):
            self._run_again("requires_grad")

    def _somebody_reads(self) -> None:
        """Parameters are about to be read, by the model or by the program.

        What is computed with them beside a forward that was replayed belongs to its backward. So that forward runs as
        ever, too: gradients of both are reduced once. At stages 1 and 2 one rank alone may come here.
        """
        if self._engaged is None or self._parts.transport.tries or self._guard.dirty:
            return
        opened, replay = self._engaged[1], self._parts.runtime.replay
        opened.show_gathered()
        computes = not self._mine and torch.is_grad_enabled() and current_graph_task() < 0
        if not (computes and opened.awaits):
            return
        with _Mine(self), self._guard("a module that is called by itself"):
            if not replay.keeps_all:
                self._guard.meet()
            opened.run_again()


class _Mine:
    """The scope of a call of the loop."""

    __slots__ = ("_before", "_graphs")

    def __init__(self, graphs: Graphs) -> None:
        self._graphs, self._before = graphs, False

    def __enter__(self) -> None:
        self._before = self._graphs.enter(True)

    def __exit__(self, *_: object) -> None:
        self._graphs.enter(self._before)
