"""The engine's methods about the size of gradients: loss scale, clipping, and steps that are skipped."""

from __future__ import annotations

import logging
from typing import Final

import torch

from zeroweave.config import Config
from zeroweave.engine.guard import Guard, Progress
from zeroweave.engine.parts import Parts
from zeroweave.engine.window import Windows
from zeroweave.errors import NonFiniteError
from zeroweave.notices import warn
from zeroweave.optim.scaler import Scaler, checks, loss_scale_of
from zeroweave.runtime.runtime import Runtime

_LOG: Final = logging.getLogger("zeroweave")


def scaler_of(parts: Parts) -> Scaler:
    """The scaler that an engine's config asks for."""
    runtime, transport = parts.runtime, parts.transport
    layouts = [b.layout for b in runtime.buckets.values()]
    return Scaler(
        runtime.gradients,
        loss_scale_of(parts.config, layouts),
        checks(parts.config, layouts),
        lambda tensor: transport.all_reduce_sum(tensor),  # whose way there may change
        parts.device,
    )


class Scaling(Windows):
    """A part of `Engine`."""

    config: Config
    rank: int
    skipped_steps: int
    _parts: Parts
    _runtime: Runtime
    _guard: Guard
    _progress: Progress
    _scaler: Scaler
    _scaled: bool
    """was the loss of the present backward scaled, or the engine asked to?"""
    _warned: bool

    @property
    def loss_scale(self) -> float:
        """What the losses of the present window are multiplied by; 1 where nothing is scaled."""
        return self._scaler.loss_scale.value

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, divided by the accumulated micro-steps: `engine.scale(loss).backward()`.

        In float32 at least where there is a loss scale.
        """
        return self._scale(loss, self._divisor)

    def _scale(self, loss: torch.Tensor, steps: int) -> torch.Tensor:
        self._scaled = True
        return self._scaler.loss_scale.of(loss / steps if steps > 1 else loss)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the window's gradients to a global 2-norm of at most `max_norm`; returns the norm before.

        The norm is float32, 0-dim, on the engine's device, without the loss scale; each parameter counts once,
        whatever names it has. To be called between the boundary's backward and `step()`. Collective.
        """
        with self._guard("clip_grad_norm_"):
            self._reduce_rest("clip_grad_norm_()")
            return self._scaler.clip(max_norm)

    def get_global_grad_norm(self) -> float | None:
        """The global 2-norm that the last clipping found, before it; None if nothing was clipped yet.

        A step that is skipped clips nothing.
        """
        return None if self._scaler.norm is None else float(self._scaler.norm)

    def _warn_unscaled(self) -> None:
        """A plain `loss.backward()`: said once where that looks unintended."""
        scale, steps = self.loss_scale, self._divisor
        missing = [f"divide by gradient_accumulation_steps ({steps})"] if steps > 1 else []
        missing += [f"multiply by the loss scale ({scale:g})"] if scale != 1.0 else []
        if missing:
            self._warned = True
            warn(
                f"loss.backward() does not {' or '.join(missing)}; use engine.backward(loss) or "
                "engine.scale(loss).backward() unless the loss is scaled already",
                self.rank,
            )

    def _nonfinite(self) -> bool:
        """Are gradients of this rank infinite or NaN? False where nobody looks."""
        return self._scaler.checks and self._scaler.nonfinite()

    def _may_apply(self, nonfinite: bool) -> bool:
        """Does the optimizer step take place? Counts, logs and adapts the loss scale where it does not.

        `nonfinite`: some rank's gradients are not finite; the same on all ranks. NonFiniteError where that is asked
        for, and a lower loss scale would not help.
        """
        scale = self._scaler.loss_scale
        if not nonfinite:
            return True
        if self.config.on_nonfinite == "raise" and scale.at_minimum:
            raise NonFiniteError(self._describe())
        before = scale.value
        scale.update(overflow=True)
        self.skipped_steps += 1
        if self.rank == 0:
            _LOG.warning(
                "zeroweave: optimizer step %d skipped, because gradients are infinite or NaN; %s%d skipped so far",
                self._progress.step,
                f"the loss scale was {before:g} and is {scale.value:g}; " if scale.dynamic else "",
                self.skipped_steps,
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
        ranks = self._parts.control.all_gather_object(here, "which gradients are not finite")
        names = sorted({name for names in ranks for name in names})
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return (
            f"step {self._progress.step}: the gradients of {', '.join(map(repr, names[:8]))}{more} are infinite or "
            "NaN; nothing was written. Call engine.zero_grad() to go on without this step"
        )
