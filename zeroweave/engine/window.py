"""Windows: which backwards reduce, and which of them the optimizer step follows.

    with engine.no_sync():                  backwards inside add up locally; the next one outside reduces for all
    with engine.coalesce_grad_reduction():  backwards inside add up locally; the end of the block reduces for all

Both are a flag that a backward reads when it begins, at every stage, compiled or eager: it decides between a bucket's
reduction and a local sum, and nothing is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, Literal

import torch

from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.engine.context import EngineContext
from zeroweave.engine.scheduler import Scheduler
from zeroweave.errors import EngineError, UnsupportedWindow
from zeroweave.notices import warn
from zeroweave.optim.scaler import Scaler
from zeroweave.runtime.backward_order import Observer

Block = Literal["no_sync", "coalesce_grad_reduction"]

_PIPELINES: Final = frozenset({"GPipe", "Pipe", "PipelineModule", "PipelineParallel", "PipelineStage"})
"""Names of the classes, in the libraries that have them, whose forward is a schedule of many."""


class Window(Observer):
    """The micro-steps between two optimizer steps of one engine, and their backwards, of which the runtime tells it.

    The `refuse_…` methods raise EngineError where `what`, a call as users write it, cannot be done now.
    """

    def __init__(
        self, context: EngineContext, scaler: Scaler, scheduler: Scheduler, shown: ParameterVisibility
    ) -> None:
        self._context, self._config, self._runtime, self._guard = (
            context,
            context.config,
            context.runtime,
            context.guard,
        )
        self._scaler, self._scheduler, self._shown = scaler, scheduler, shown
        self.micro_steps = 0
        """micro-steps since the engine was made"""
        self._steps = 0
        """those of the open window"""
        self._backwards = 0
        """backwards that have trained since the last `step()`"""
        self.said: bool | None = None
        """true if the present micro-step ends the window, as the caller has said; None: they are counted"""
        self.defers: Block | None = None
        """the block that the program is in, if its backwards do not reduce"""
        self._coalesced = False
        """true if the window holds what a block has reduced; then the next `step()` is its end"""
        self._scaled = False
        """true if the loss of the present backward was scaled, or the engine was asked to"""
        self._warned = False
        """true if a warning has said that a loss was not"""

    def remember(self) -> Callable[[], None]:
        """Returns a function that restores what steps change here and `abort` does not reset."""
        now = self.micro_steps, self.said

        def back() -> None:
            self.micro_steps, self.said = now

        return back

    def resume(self, micro_steps: int) -> None:
        """Continues after that many micro-steps, with a new window."""
        self.micro_steps = micro_steps

    def window_began(self) -> None:
        self._scheduler.window_began()

    def forward_began(self) -> None:
        if self._context.optimizer is not None:
            self._context.optimizer.offload.recall()

    # ------------------------------------------------------------------ backwards
    def scale(self, loss: torch.Tensor, by_steps: bool = True) -> torch.Tensor:
        """`loss` times the loss scale, divided by the accumulated micro-steps unless told not to."""
        self._scaled, steps = True, self.divisor if by_steps else 1
        return self._scaler.scale(loss / steps if steps > 1 else loss)

    @property
    def divisor(self) -> int:
        """What a loss is divided by: the window's backwards are counted, except in a coalesced block."""
        return 1 if self.defers == "coalesce_grad_reduction" else self._config.gradient_accumulation_steps

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """The backward of a loss that is scaled."""
        with ExitStack() as after:
            if loss.requires_grad:  # a loss that reaches no parameter on this rank is a backward all the same
                hook = loss.register_hook(lambda _: self._runtime.note_backward(trains=True))
                after.callback(hook.remove)  # later backwards of this loss may be others
            loss.backward(retain_graph=retain_graph)

    def reduces(self) -> bool:
        return self.defers is None and (self._config.stage > 1 or self.is_boundary())

    def backward_began(self) -> None:
        if self._guard.destroyed:
            self._runtime.abort()
            raise EngineError("[ZW407] a backward of a loss that was made before engine.destroy(): call it before")
        self._scaler.settle_clipping()
        self._shown.show()
        if (optimizer := self._context.optimizer) is not None and self.is_boundary():
            optimizer.offload.run_ahead()

    def backward_ended(self, trained: bool) -> None:
        self._shown.hide()
        if self._context.optimizer is not None:
            self._context.optimizer.offload.stand()
        if not trained:
            return
        self._backwards += 1
        self._context.stubs.gradients_wait()
        if not (self._scaled or self._warned):
            self._warn_unscaled()
        self._scaled = False
        if self._config.debug.check_every_step:
            self._context.agreements.backward()

    def _warn_unscaled(self) -> None:
        """A plain `loss.backward()`: warns once where it looks unintended."""
        scale, steps = self._scaler.loss_scale.value, self.divisor
        missing = [f"divide by gradient_accumulation_steps ({steps})"] if steps > 1 else []
        missing += [f"multiply by the loss scale ({scale:g})"] if scale != 1.0 else []
        if missing:
            self._warned = True
            warn(
                f"loss.backward() does not {' or '.join(missing)}; use engine.backward(loss) or "
                "engine.scale(loss).backward() unless the loss is scaled already",
                self._context.control.rank,
            )

    # ------------------------------------------------------------------ blocks whose backwards do not reduce
    @contextmanager
    def deferring(self, block: Block | None) -> Iterator[None]:
        """Backwards inside are those of a block; None: of none."""
        before, boundary = self.defers, self.said
        self.defers = block
        try:
            yield
        finally:
            self.defers = before
            if block == "coalesce_grad_reduction":
                self.said = boundary

    def reduce(self) -> None:
        """The end of a coalesced block. Collective."""
        self._coalesced = self._runtime.reduce_rest() or self._coalesced

    def reduce_rest(self, what: str) -> None:
        """`what` needs reduced gradients: from now on all are, and settled. Collective."""
        self.refuse_coalescing(what)
        self._runtime.reduce_rest()
        gradients = self._runtime.gradients
        if late := gradients.marked(self._context.agreements.union("late gradients", gradients.late())):
            self._runtime.replay.reduce_late(late)
        gradients.settle_all()

    # ------------------------------------------------------------------ its end
    def is_boundary(self) -> bool:
        """True if the optimizer step follows the present backward."""
        if self.said is not None:
            return self.said
        if self.defers == "coalesce_grad_reduction":
            return False
        return self._coalesced or self._steps + 1 >= self._config.gradient_accumulation_steps

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Says whether the present micro-step ends the window, until said otherwise; None: count again."""
        self.said = is_boundary

    def ends(self) -> bool:
        """`step()` is called, unless it is refused. True if it ends the window."""
        if self._context.optimizer is None:
            raise EngineError("[ZW405] step() needs an optimizer: pass one to zeroweave.initialize")
        self.refuse_inside("step()", profiling=False)
        self.refuse_coalescing("step()")
        self.refuse_computing("step()", "call it after them")
        if self._backwards == 0:
            raise EngineError(
                "[ZW402] step() without a backward since the last step(): call engine.backward(loss) first"
            )
        return self.is_boundary()

    def micro_step_ended(self, boundary: bool) -> None:
        """All of `step()` is done."""
        self._coalesced, self._backwards = False, 0
        self.micro_steps += 1
        self._steps = 0 if boundary else self._steps + 1

    def abort(self) -> None:
        """Forgets the open window and what an exception left behind; the engine is dirty until all of that is done."""
        schedule, broken = self._runtime.replay.schedule, self._guard.dirty
        with self._guard.cleaning():
            self._runtime.abort()
            self._runtime.next_window(schedule)
            strays = [bucket.forget_strays(int(self._shown.is_open)) for bucket in self._runtime.buckets.values()]
            if broken or any(strays):  # what is in memory now is unknown
                self._runtime.replay.lingering.let_go()
            self._scheduler.abort()
            self._shown.reset()
            self._scaler.next_window()
            self._context.stubs.gradients_gone()
            self._backwards = self._steps = 0
            self._scaled = self._coalesced = False

    # ------------------------------------------------------------------ refusals
    def refuse_inside(self, what: str, profiling: bool = True) -> None:
        """In blocks where values mean nothing, or are the user's."""
        if profiling and self._context.transport.skips:
            raise EngineError(
                f"[ZW402] {what} inside `with engine.profiling():`, where values mean nothing: leave it first"
            )
        if self._runtime.writable:
            raise EngineError(
                f"[ZW402] {what} inside `with engine.full_parameters():`, which keeps writes: leave it first"
            )

    def refuse_coalescing(self, what: str) -> None:
        """Where nothing is reduced."""
        if self.defers == "coalesce_grad_reduction":
            raise EngineError(
                f"[ZW402] {what} inside `with engine.coalesce_grad_reduction():`, where gradients are not reduced: "
                "leave it first"
            )

    def refuse_computing(self, what: str, instead: str) -> None:
        """In a forward or backward."""
        if self._runtime.in_backward:
            self._runtime.note_backward()  # one that did not finish says so
        if self._runtime.in_session or self._runtime.in_backward:
            raise EngineError(f"[ZW402] {what} inside a forward or backward: {instead}")

    def refuse_waiting(self, what: str) -> None:
        """In the middle of a window."""
        if self._context.stubs.gradients_pending or self._steps:
            raise EngineError(
                f"[ZW402] {what} while gradients wait: call it after the step() that ends the window, or zero_grad()"
            )

    def refuse_block(self) -> None:
        """Where `coalesce_grad_reduction()` cannot begin. UnsupportedWindow where it never can."""
        self.refuse_coalescing("coalesce_grad_reduction()")
        if self.defers is not None:
            raise EngineError("[ZW402] coalesce_grad_reduction() inside `with engine.no_sync():`: leave it first")
        self.refuse_computing("coalesce_grad_reduction()", "enter it around them")
        if self._context.optimizer is None:
            raise EngineError("[ZW405] coalesce_grad_reduction() needs an optimizer: pass one to zeroweave.initialize")
        kinds = {kind.__name__ for module in self._context.model.modules() for kind in type(module).__mro__}
        if pipelines := kinds & _PIPELINES:
            raise UnsupportedWindow(
                f"coalesce_grad_reduction() with a pipeline module ({', '.join(sorted(pipelines))}): it runs the "
                "backwards of its micro-batches by itself and reduces when its own schedule says; train each stage's "
                "plain module"
            )
        optimizer = self._context.optimizer.optimizer
        if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedWindow(
                f"coalesce_grad_reduction() with {type(optimizer).__name__}, an optimizer wrapper that hides "
                "its parameters: no trainable one is in its param_groups, so the reduced gradients would reach nobody; "
                "pass the optimizer inside it"
            )
