"""The loss scale, clipping by the global norm, and what gradients are multiplied by on their way to the optimizer.

Gradients stay as they were reduced until the optimizer takes them: then 1 / loss scale and the clip coefficient are
multiplied into them in one pass, in the dtype of the masters. So nothing small is lost in float16, and a step that
is skipped has written nothing.

Gradient shards are disjoint and their padding is zero, so the squares of the local norms add up over the ranks.
Clipping waits for no device. Its coefficient differs from that of `torch.nn.utils.clip_grad_norm_` in its last bits,
because torch takes the norm of per-parameter norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from zeroweave._torch.foreach import foreach_maxima, foreach_norms
from zeroweave.comm.transport import Transport
from zeroweave.config import Config
from zeroweave.layout import BucketLayout
from zeroweave.runtime.gradients import Gradients

_LARGEST: Final = 2.0**127
"""A scale beyond it would be infinite in float32."""


class LossScale:
    """What losses are multiplied by before their backward, so that small gradients survive float16.

    A *dynamic* scale is halved by an overflow and doubled by `window` steps in a row without one, and stays at
    `minimum` or above. `hysteresis` - 1 overflows are forgiven before it is halved, and again after each doubling.
    With `hysteresis` 1 its course is that of `torch.amp.GradScaler`. Not dynamic, it never changes.
    """

    def __init__(
        self, value: float, dynamic: bool = False, window: int = 2000, hysteresis: int = 1, minimum: float = 1.0
    ) -> None:
        self.value, self.dynamic = value, dynamic
        self._window, self._hysteresis, self._minimum = window, hysteresis, minimum
        self.good_steps = 0
        """steps in a row without an overflow, since the last change"""
        self.patience = hysteresis
        """overflows until the scale is halved"""

    @property
    def at_minimum(self) -> bool:
        """True if it cannot be lowered, so that an overflow has another cause. False while one is forgiven."""
        return not self.dynamic or (self.value <= self._minimum and self.patience <= 1)

    def of(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the scale, in float32 at least; `loss` itself where the scale is 1."""
        if self.value == 1.0:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    def update(self, overflow: bool) -> None:
        """After each optimizer step, and each that was skipped because gradients had overflowed."""
        if not self.dynamic:
            return
        if not overflow:
            self.good_steps += 1
            if self.good_steps >= self._window:  # a run with a longer window may have been resumed
                self.good_steps, self.patience = 0, self._hysteresis
                self.value = min(2.0 * self.value, _LARGEST)
            return
        self.good_steps = 0
        if self.patience > 1:
            self.patience -= 1
        else:
            self.value = max(self.value / 2.0, self._minimum)

    def state(self) -> dict[str, float]:
        """What `resume` continues with."""
        return {"value": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def resume(self, state: Mapping[str, float]) -> None:
        """Continues with the scale of another run; one that is not dynamic stays what it is."""
        if self.dynamic:
            self.value = state["value"]
            self.good_steps, self.patience = int(state["good_steps"]), int(state["patience"])


def loss_scale_of(config: Config, layouts: Iterable[BucketLayout]) -> LossScale | None:
    """The loss scale that a config asks for: where it names none, a dynamic one if anything is trained in float16."""
    wanted = config.precision
    scale = wanted.loss_scale
    if scale is None:
        trains_half = any(b.trainable and b.dtype == "float16" for b in layouts)
        if not trains_half and wanted.autocast != "float16":
            return None
        scale = "dynamic"
    if scale != "dynamic":
        return LossScale(scale)
    return LossScale(
        wanted.initial_loss_scale,
        dynamic=True,
        window=wanted.loss_scale_window,
        hysteresis=wanted.loss_scale_hysteresis,
        minimum=wanted.min_loss_scale,
    )


def checks(config: Config, layouts: Iterable[BucketLayout]) -> bool:
    """True if an optimizer step looks for gradients that are not finite before it writes anything."""
    return config.on_nonfinite is not None or loss_scale_of(config, layouts) is not None


def total_norm(
    tensors: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], object], device: torch.device
) -> torch.Tensor:
    """The global 2-norm, fp32, 0-dim. `all_reduce` sums a number over the ranks, in place, on `device`.

    Squares are added in fp64, where they neither overflow nor depend on the number of buckets and ranks in the digits
    that fp32 shows. Infinities and NaNs pass through.
    """
    norms = foreach_norms(tensors)
    total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    all_reduce(total)
    return total.sqrt().float()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by to have at most `max_norm`: fp32, 0-dim, at most 1, as in torch.

    Of a norm that is not finite it is 0 or NaN, as in torch; a caller that skips such steps looks at the norm.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class Scaled(NamedTuple):
    """A gradient [numel / world], which the caller owns, and what it is still to be multiplied by."""

    values: torch.Tensor
    factor: torch.Tensor | float | None = None
    """None for 1; a tensor is float32, 0-dim, on the device"""

    def product(self) -> torch.Tensor:
        """In float32 at least where there is a factor; the gradient is used up."""
        if self.factor is None:
            return self.values
        return self.values.to(torch.promote_types(self.values.dtype, torch.float32)).mul_(self.factor)


class Scaler:
    """What is done to a window's gradients on this rank between their reduction and the optimizer.

    `loss_scale`: None for none. `checks`: see the function.
    """

    def __init__(
        self,
        gradients: Gradients,
        loss_scale: LossScale | None,
        checks: bool,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.checks = checks
        self._gradients, self._transport, self._device = gradients, transport, device
        self.loss_scale = loss_scale or LossScale(1.0)
        self.norm: torch.Tensor | None = None
        """the global norm that the last clipping found"""
        self.limits: list[float] = []
        """the norms that the window's gradients were clipped to"""
        self._coefficient: torch.Tensor | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale."""
        return self.loss_scale.of(loss)

    def nonfinite(self) -> bool:
        """True if a reduced gradient of this rank is infinite or NaN. Waits for the reductions, and for the device."""
        self._gradients.settle_all()
        shards = self._gradients.shards()
        return bool(shards) and not bool(torch.stack(foreach_maxima(shards)).isfinite().all())

    def clip(self, max_norm: float) -> torch.Tensor:
        """Makes the global 2-norm of the gradients at most `max_norm`; returns the norm before, fp32, 0-dim."""
        self._gradients.settle_all()
        # A gradient that several ranks have counts on the first of them.
        accounts = (each for _, each in sorted(self._gradients.accounts.items()) if not each.bucket.copy)
        shards = [each.shard for each in accounts if each.shard is not None and each.shard.numel()]
        norm = total_norm(shards, self._transport.all_reduce_sum, self._device)
        if (factor := self._factor) is not None:
            norm = norm * factor
        self.limits.append(max_norm)
        coefficient = clip_coefficient(norm, max_norm)
        self._coefficient = coefficient if self._coefficient is None else self._coefficient * coefficient
        self.norm = norm
        return norm

    @property
    def _factor(self) -> torch.Tensor | float | None:
        """What a reduced gradient is multiplied by; None where that is 1."""
        if self._coefficient is None:
            return self._inverse
        return self._coefficient if self._inverse is None else self._coefficient * self._inverse

    @property
    def _inverse(self) -> torch.Tensor | float | None:
        """1 / loss scale; None where that is 1."""
        return None if self.loss_scale.value == 1.0 else 1.0 / self.loss_scale.value

    def take(self, bucket: int) -> Scaled | None:
        """The gradient [shard_numel] of a bucket for the optimizer, which owns it then; None if the bucket has none."""
        gradient = self._gradients.take(bucket)
        return None if gradient is None else Scaled(gradient, self._factor)

    def look(self, bucket: int) -> torch.Tensor | None:
        """The gradient that `take` would give, in float32 at least. Not to be written."""
        gradient, factor = self._gradients.shard(bucket), self._factor
        if gradient is None:
            return None
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return gradient if factor is None else gradient * factor

    def write(self, bucket: int, slot: int, value: torch.Tensor) -> None:
        """Replaces this rank's fragment [numel of the fragment] of one gradient, given as the optimizer would take it.

        EngineError where the window has no reduced gradients.
        """
        self.settle_clipping()
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        self._gradients.write(bucket, slot, value * self.loss_scale.value)

    def settle_clipping(self) -> None:
        """Multiplies the clip coefficient into the gradients now: others are about to be added, or to replace them."""
        if self._coefficient is not None:
            self._gradients.multiply(self._coefficient)
            self._coefficient = None

    def next_window(self, stepped: bool = False) -> None:
        """The window's gradients are gone. `stepped`: the optimizer had them."""
        self._coefficient = None
        self.limits = []
        if stepped:
            self.loss_scale.update(overflow=False)

    def remember(self) -> Callable[[], None]:
        """What brings the loss scale and the norm back to what they are now."""
        norm, scale = self.norm, self.loss_scale.state()

        def back() -> None:
            self.norm = norm
            self.loss_scale.resume(scale)

        return back
