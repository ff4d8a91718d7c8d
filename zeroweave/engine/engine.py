"""The engine: the training loop's face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from zeroweave.comm.ledger import Ledger
from zeroweave.eager.access import Shown
from zeroweave.engine import state_dict as state
from zeroweave.engine.calls import Calls, session
from zeroweave.engine.guard import Agreements, Found
from zeroweave.engine.parts import Opened, Parts, adaptive_of
from zeroweave.engine.samples import Samples
from zeroweave.engine.scheduler import scheduler_of
from zeroweave.engine.scheduling import Scheduling
from zeroweave.engine.snapshot import Snapshot
from zeroweave.engine.stats import Stats
from zeroweave.engine.step import Scaling, scaler_of
from zeroweave.engine.values import Accessors
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout
from zeroweave.notices import warn
from zeroweave.optim.room import Room
from zeroweave.optim.states import Gathered
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.runtime import Observer
from zeroweave.schedule import Schedule


class _Backwards(Observer):
    """What the runtime tells an engine about backwards."""

    def __init__(self, reduces: Callable[[], bool], began: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._reduces, self._began, self._ended = reduces, began, ended

    def reduces(self) -> bool:
        return self._reduces()

    def backward_began(self) -> None:
        self._began()

    def backward_ended(self, trained: bool) -> None:
        self._ended(trained)


class Engine(Scheduling, Scaling, Accessors):
    """Trains one model, sharded over the ranks of a process group. Made by `zeroweave.initialize`.

    Every method that computes or communicates is collective: all ranks call it in the same order. An engine that is
    dropped without `destroy` is garbage together with its model.
    """

    def __init__(self, parts: Parts, lr_scheduler: Any = None) -> None:
        self._parts, self._runtime = parts, parts.runtime
        self.module, self.config, self.device = parts.model, parts.config, parts.device
        self.rank, self.world = parts.control.rank, parts.control.world
        self.lr_scheduler = lr_scheduler
        self.micro_steps = self.skipped_steps = 0
        self._progress, self._alarm, self._guard = parts.progress, parts.alarm, parts.guard
        self._agreements = Agreements(parts.control, parts.transport, self._alarm, self._progress)
        self._applied = self._warned = self._scaled = False
        self._backwards = self._window_steps = 0
        self._boundary: bool | None = None
        self._scaler = scaler_of(parts)
        self._executed = ()
        self._scheduler = scheduler_of(parts, self._agreements)
        self._adaptive = adaptive_of(parts)
        self._samples = Samples.asked_for(self._scheduler, self.rank)
        progress = self._progress
        self._calls = Calls(
            parts.model, parts.runtime, parts.config, self._session, self.rank, lambda: progress.step == 0
        )
        self._shown = Shown(parts.places, self._calls.access)
        self._opened = Opened(parts.runtime, self._shown, parts.status)
        self._runtime.attach(_Backwards(self._reduces, self._backward_began, self._backward_ended))
        if self.config.gather_after_step:
            self._opened.open()
        self._traffic = parts.ledger.step()
        parts.ledger.begin_step()

    # ------------------------------------------------------------------ looking at it
    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer."""
        return None if self._parts.optimizer is None else self._parts.optimizer.optimizer

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, without those that were skipped."""
        return self._progress.step - self.skipped_steps

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        return tuple(b.layout for b in self._runtime.buckets.values())

    @property
    def stats(self) -> Stats:
        """Counters of this rank at this moment."""
        parts, seconds = self._parts, self._scheduler.seconds
        return Stats.read(self._runtime, parts.ledger, self._calls, parts.optimizer, self._traffic, seconds)

    # ------------------------------------------------------------------ forward and backward
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's module; floating inputs are cast to `precision.params` where that is set."""
        with self._guard("forward"):
            args, kwargs = self._calls.inputs(args, kwargs)
            with self._session(), self._calls.compiling():
                return self._calls.own_outputs(self.module(*args, **kwargs))

    def train_step(self, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None) -> torch.Tensor:
        """One micro-step: forward, loss, backward, `step()`. Returns the detached, unscaled loss.

        `batch` is a mapping (keyword arguments), a tuple or list (arguments) or one argument. The loss is
        `loss_fn(output, batch)`, else the output itself if it is a tensor, else its `.loss`.
        """
        if isinstance(batch, Mapping):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, tuple | list) else self(batch)
        with self._guard("loss_fn"):
            if loss_fn is not None:
                loss = loss_fn(output, batch)
            else:
                loss = output if isinstance(output, torch.Tensor) else output.loss
        self.backward(loss)
        self.step()
        return loss.detach()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """The backward of `loss` times the loss scale, divided by the accumulation count unless told not to."""
        with self._guard("backward"):
            loss = self._scale(loss, self._divisor if scale_wrt_gas else 1)
            with ExitStack() as after:
                if loss.requires_grad:  # a loss that reaches no parameter on this rank is a backward all the same
                    hook = loss.register_hook(lambda _: self._runtime.note_backward(trains=True))
                    after.callback(hook.remove)  # later backwards of this loss may be others
                loss.backward(retain_graph=retain_graph)

    def _backward_began(self) -> None:
        if self._guard.destroyed:
            self._runtime.abort()
            raise EngineError("a backward of a loss that was made before engine.destroy(): call it before")
        self._scaler.settle_clipping()
        self._shown.show()

    def _backward_ended(self, trained: bool) -> None:
        self._shown.hide()
        if not trained:
            return
        self._backwards += 1
        self._parts.status.gradients_pending = True
        if not (self._scaled or self._warned):
            self._warn_unscaled()
        self._scaled = False
        if self.config.debug.check_every_step:
            self._agreements.backward()

    # ------------------------------------------------------------------ step
    def step(self) -> None:
        """Ends a micro-step; at the boundary, the optimizer step. To be called after every backward."""
        with self._guard("step"):
            if self._parts.optimizer is None:
                raise EngineError("step() needs an optimizer: pass one to zeroweave.initialize")
            self._refuse_inside("step()", profiling=False)
            self._refuse_coalescing("step()")
            self._refuse_computing("step()", "call it after them")
            if self._backwards == 0:
                raise EngineError("step() without a backward since the last step(): call engine.backward(loss) first")
            boundary = self.is_gradient_accumulation_boundary()
            self._applied, self._coalesced, self._backwards = False, False, 0
            if boundary:
                self._applied = self._apply(self._parts.optimizer)
            self.micro_steps += 1
            self._window_steps = 0 if boundary else self._window_steps + 1
        if boundary and self._samples is not None:
            self._samples.step_ended(self.global_steps, self.stats)

    def _apply(self, optimizer: ShardedOptimizer) -> bool:
        """The end of a window: the optimizer step, unless it is skipped. Was it not?"""
        runtime, gradients, replay = self._runtime, self._runtime.gradients, self._runtime.replay
        runtime.note_backward()  # an unfinished backward is an error
        runtime.reduce_rest()
        followed = replay.arrive()
        self._opened.close()
        if not followed:
            needed = replay.record.needed()
            if not replay.keep:  # else ranks may compute different things, and each records its own
                needed = self._agreements.union("what the backwards needed", needed)
            replay.record.prune(needed)
        candidate = self._scheduler.candidate(followed)
        found = self._agree(candidate)
        if late := gradients.marked(found.late):
            replay.reduce_late(late)
            found = self._agree(candidate)
        decision, absent = found.decision, gradients.absent(found.had_gradient)
        applies = self._may_apply(decision.nonfinite)
        if applies:
            if self.config.gradient_clipping is not None:
                self.clip_grad_norm_(self.config.gradient_clipping)
            updates = frozenset(absent)
            replay.finish(optimizer.in_turn(self._scaler.take, absent, replay.update_order(updates)), updates)
            for bucket_id in absent:
                runtime.buckets[bucket_id].renew()
        else:
            replay.finish(gradients.drop, frozenset(absent))
        self._executed = tuple(replay.executed)
        runtime.next_window(self._scheduler.next(candidate, decision.adopt, applies))
        runtime.release_kept()
        if applies:
            runtime.rewrite_views(found.viewed)
        self._scaler.next_window(stepped=applies)
        if self._adaptive is not None and applies and not self._parts.transport.skips:
            self._adaptive.step_ended(self._scheduler.settled)
        self._parts.status.gradients_pending = False
        self._progress.step += 1
        if applies and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.config.gather_after_step:
            self._opened.open()
        if not self._parts.transport.skips:
            self._traffic = self._parts.ledger.step()
            self._parts.ledger.begin_step()
        return applies

    def _agree(self, candidate: Schedule) -> Found:
        gradients = self._runtime.gradients
        return self._agreements.step(
            gradients.had_gradient(), gradients.late(), self._runtime.viewed(), candidate, self._nonfinite
        )

    def was_step_applied(self) -> bool:
        """Did the last `step()` run the optimizer? Not inside a window, nor where gradients were not finite."""
        return self._applied

    def zero_grad(self) -> None:
        """Drops the window's gradients; after an exception on all ranks, whatever it left behind."""
        with self._guard("zero_grad", clean=False):
            self._abort()

    @contextmanager
    def profiling(self) -> Iterator[Ledger]:
        """Inside, steps run without any communication; afterwards everything that they changed is as before.

        Yields the ledger of what they would have sent. Gathers give copies of this rank's shards and reductions zeros,
        so losses and norms mean nothing, and values cannot be read. A `Snapshot` brings back, bit for bit, after an
        exception too; it costs a second copy of the trained shards, the optimizer's state and the module's buffers.
        All ranks enter it, between windows; how many steps each runs inside is its own affair.
        """
        with self._guard("profiling"):
            self._refuse_inside("profiling()")
            self._refuse_coalescing("profiling()")
            if self._runtime.in_session or self._runtime.in_backward or self._runtime.replay.record:
                raise EngineError("profiling() in the middle of a window: enter it after step() or zero_grad()")
            reopen = self._opened.is_open
            self._opened.close()
            self._abort()  # nothing stays gathered
            before = Snapshot(self._parts, self.lr_scheduler)
            before.attributes(self._progress, "step")
            before.attributes(self, "micro_steps", "skipped_steps", "_applied", "_boundary", "_executed")
            self._scaler.keep(before.attributes)
        with ExitStack() as after:  # all of it, whichever raises; the last first
            after.callback(self._reopen, reopen)
            after.callback(self._rewrite_views)
            after.callback(before.restore)
            after.callback(self._parts.transport.skip, False)
            after.callback(self._abort)
            after.callback(self._opened.close)
            self._parts.transport.skip(True)
            if reopen:
                self._opened.open()
                self._parts.transport.skip(True)  # anew: that gather belongs to no step
            yield self._parts.transport.planned

    # ------------------------------------------------------------------ state
    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def destroy(self, optimizer_state: bool = True) -> None:
        """Gives the model back as an ordinary one with its full parameters, and ends what the engine started.

        Collective. The optimizer's groups hold the user's parameters again, and its state is that of whole parameters,
        on every rank, in the dtypes that it keeps (float32 at least): on the engine's device if all ranks have room
        there, else in host memory. Where neither has room, a warning says so, and the optimizer has no state; with
        `optimizer_state=False` it has none anyway. `initialize` takes model and optimizer over as they are. A process
        group stays for later engines, also one that `initialize` has started.
        """
        if self._guard.destroyed:
            return
        with self._guard("destroy" if optimizer_state else "destroy(optimizer_state=False)", clean=False):
            self._refuse_inside("destroy()")
            self._refuse_coalescing("destroy()")
            self._guard.meet()
            self._abort()
            self._opened.close()
            values, optimizer = state.full_values(self._runtime, self._parts.original_dtypes), self._parts.optimizer
            states, lacking = Gathered({})
            if optimizer is not None and optimizer_state:
                room = Room.now(self.device)  # beside the parameters
                states, lacking = optimizer.gather(self._runtime.transport, self._parts.control, room)
        self._calls.remove()
        self._parts.places.restore(values.__getitem__)
        if optimizer is not None:
            optimizer.destroy(states)
        self._guard.close()
        self._parts.ends.close()
        if lacking is not None:  # last: a filter may make an exception of it
            warn(
                f"engine.destroy() has dropped the optimizer's state, for which no memory has room: {lacking}. The "
                "parameters are complete. To go on training later, keep the engine, or run fewer ranks on a machine; "
                "before destroy(), engine.full(name, key) gives the state of one parameter at a time. "
                "engine.destroy(optimizer_state=False) drops it without this warning",
                self.rank,
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.destroy()  # after an exception the other ranks may be anywhere: nothing collective is left to do

    # ------------------------------------------------------------------ inside
    def _session(self) -> AbstractContextManager[None]:
        return session(self._runtime, self._shown)

    def _reopen(self, was_open: bool) -> None:
        if was_open and self._alarm.fatal is None and not self._guard.dirty:
            with self._guard("profiling"):
                self._opened.open()

    def _abort(self) -> None:
        """Forgets the open window and what an exception left behind; the engine is dirty until all of that is done."""
        self._guard.dirty, schedule = True, self._runtime.replay.schedule
        self._runtime.abort()
        self._runtime.next_window(schedule)
        self._scheduler.abandon()
        self._shown.reset()
        self._scaler.next_window()
        self._parts.status.gradients_pending = False
        self._backwards = self._window_steps = 0
        self._guard.dirty = self._scaled = self._coalesced = False
