"""The engine's methods about windows: which backwards reduce, and which of them the optimizer step follows.

    with engine.no_sync():                  backwards inside add up locally; the next one outside reduces for all
    with engine.coalesce_grad_reduction():  backwards inside add up locally; the end of the block reduces for all

Both are a flag that a backward reads when it begins, at every stage, compiled or eager: it decides between a bucket's
reduction and a local sum, and nothing is traced anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from torch import nn

from zeroweave.config import Config
from zeroweave.engine.guard import Agreements, Guard
from zeroweave.engine.parts import Parts
from zeroweave.errors import EngineError, UnsupportedWindow
from zeroweave.runtime.runtime import Runtime

Deferring = Literal["no_sync", "coalesce_grad_reduction"]

_PIPELINES: Final = frozenset({"GPipe", "Pipe", "PipelineModule", "PipelineParallel", "PipelineStage"})
"""Names of the classes, in the libraries that have them, whose forward is a schedule of many."""


class Windows:
    """A part of `Engine`."""

    module: nn.Module
    config: Config
    _parts: Parts
    _runtime: Runtime
    _guard: Guard
    _agreements: Agreements
    _window_steps: int
    _boundary: bool | None
    _deferring: Deferring | None = None
    """the block that the program is in, if its backwards do not reduce"""
    _coalesced: bool = False
    """does the window hold what a block has reduced? Then the next `step()` is its end"""

    def _reduces(self) -> bool:
        """Does the backward that begins now reduce?"""
        return self._deferring is None and (self.config.stage > 1 or self.is_gradient_accumulation_boundary())

    @property
    def _divisor(self) -> int:
        """What a loss is divided by: the window's backwards are counted, except in a coalesced block."""
        return 1 if self._deferring == "coalesce_grad_reduction" else self.config.gradient_accumulation_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add their gradients up locally; a later one outside, or `step()`, reduces.

        At any stage, at the price of a full local gradient. What counts is where the backward runs, not where its
        forward did. EngineError inside `coalesce_grad_reduction()`.
        """
        with self._guard("no_sync"):
            self._refuse_coalescing("no_sync()")
        before, self._deferring = self._deferring, "no_sync"
        try:
            yield
        finally:
            self._deferring = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction: the block of one optimizer step. Collective.

        Every backward inside, however it is started, adds its gradients up locally, in `precision.accumulate`; the
        end of the block reduces each bucket once, and the next `step()` uses the result. Losses are not divided by
        `gradient_accumulation_steps`, and that `step()` ends the window, unless
        `set_gradient_accumulation_boundary` says otherwise; what it is told inside the block is forgotten at the end.
        From the first backward to the end of the block this rank holds a full local gradient.

        An exception that leaves the block leaves it unreduced: on all ranks `zero_grad()` makes everything clean (after
        a misuse that was refused, `step()` would use what the block has so far), on some ranks the others are ended.

        EngineError, which changes nothing, in another such block, inside `no_sync()` and inside a forward or backward,
        and for `step()` and all else inside that needs reduced gradients; NotImplementedError for pipeline modules and
        optimizers that hide their parameters.
        """
        with self._guard("coalesce_grad_reduction"):
            self._refuse_block()
        before, self._deferring = self._boundary, "coalesce_grad_reduction"
        try:
            with self._guard.around("coalesce_grad_reduction"):
                yield
        finally:
            self._deferring, self._boundary = None, before
        with self._guard("the end of coalesce_grad_reduction"):
            self._coalesced = self._runtime.reduce_rest() or self._coalesced

    def is_gradient_accumulation_boundary(self) -> bool:
        """Does the optimizer step follow the present backward?

        As the caller has said; else after the last of `gradient_accumulation_steps` micro-steps, and after a block of
        `coalesce_grad_reduction()`.
        """
        if self._boundary is not None:
            return self._boundary
        if self._deferring == "coalesce_grad_reduction":
            return False
        return self._coalesced or self._window_steps + 1 >= self.config.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says whether the present micro-step ends its window, until said otherwise; None: count again."""
        self._boundary = is_boundary

    def _refuse_coalescing(self, what: str) -> None:
        if self._deferring == "coalesce_grad_reduction":
            raise EngineError(
                f"{what} inside `with engine.coalesce_grad_reduction():`, where gradients are not reduced: "
                "leave it first"
            )

    def _refuse_computing(self, what: str, instead: str) -> None:
        if self._runtime.in_backward:
            self._runtime.note_backward()  # one that did not finish says so
        if self._runtime.in_session or self._runtime.in_backward:
            raise EngineError(f"{what} inside a forward or backward: {instead}")

    def _reduce_rest(self, what: str) -> bool:
        """`what` needs reduced gradients: those that have not been reduced yet are now. Was there anything?"""
        self._refuse_coalescing(what)
        reduced = self._runtime.reduce_rest()
        gradients = self._runtime.gradients
        if late := gradients.marked(self._agreements.union("late gradients", gradients.late())):
            self._runtime.replay.reduce_late(late)
        return reduced or bool(late)

    def _refuse_block(self) -> None:
        self._refuse_coalescing("coalesce_grad_reduction()")
        if self._deferring is not None:
            raise EngineError("coalesce_grad_reduction() inside `with engine.no_sync():`: leave it first")
        self._refuse_computing("coalesce_grad_reduction()", "enter it around them")
        if self._parts.optimizer is None:
            raise EngineError("coalesce_grad_reduction() needs an optimizer: pass one to zeroweave.initialize")
        kinds = {kind.__name__ for module in self.module.modules() for kind in type(module).__mro__}
        if pipelines := kinds & _PIPELINES:
            raise UnsupportedWindow(
                f"coalesce_grad_reduction() with a pipeline module ({', '.join(sorted(pipelines))}): it runs the "
                "backwards of its micro-batches by itself and reduces when its own schedule says; train each stage's "
                "plain module"
            )
        optimizer = self._parts.optimizer.optimizer
        if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
            raise UnsupportedWindow(
                f"coalesce_grad_reduction() with {type(optimizer).__name__}, an optimizer wrapper that hides "
                "its parameters: no trainable one is in its param_groups, so the reduced gradients would reach nobody; "
                "pass the optimizer inside it"
            )
