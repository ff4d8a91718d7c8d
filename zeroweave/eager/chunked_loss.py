"""Cross-entropy without whole logits: a head waits for `F.cross_entropy`, and then computes it in chunks of tokens.

The model's own code runs, with `Logits` in the place of its logits, of which it can cut tokens and take the loss. All
else is an error. So no model trains with another loss than its own, such as one that scales or caps its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zeroweave._torch.fx import flatten
from zeroweave._torch.modules import hooks_as_called
from zeroweave.eager.hooks import ModuleCall
from zeroweave.errors import EngineError

BYTES: Final = 256 << 20
"""Of a chunk's logits in float32. With 128,000 classes that is 512 tokens, which keep matmuls busy."""


class Head:
    """The head of a model, whose calls can wait for the loss.

    `call` executes it. `model`: its class, for errors. EngineError for another head than a plain `nn.Linear`.
    """

    def __init__(self, call: ModuleCall, model: str) -> None:
        self._call, self._model, module = call, model, call.module
        if type(module) is not nn.Linear:
            self.refuse(f"has a {type(module).__name__} as its head, which is no plain torch.nn.Linear")
        if hooks_as_called(module) or "forward" in vars(module):
            self.refuse(f"has hooks or another forward on its head {call.name!r}")
        self.classes = module.out_features

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, calls of the head that are differentiated return `Logits`."""
        self._call.install(self)
        try:
            yield
        finally:
            self._call.install()

    def __call__(self, input: Tensor) -> Any:
        return Logits(self, input) if torch.is_grad_enabled() else self._call(input)

    def loss(self, *given: Any) -> Tensor:
        """`chunked_cross_entropy` with the head's weight and bias, in an execution of the head."""
        found: Tensor = self._call.forward(self._call, (_Waiting(given),), {})
        return found

    def refuse(self, what: str) -> NoReturn:
        """`what` the model has or does."""
        raise EngineError(
            f"[ZW401] loss 'chunked': {self._model} {what}. Its whole logits would be needed: leave loss 'chunked' out"
        )


class _Waiting:
    """What a head is called with for the loss. Its linear operator computes that."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any], kwargs: Any = None) -> Tensor:
        assert function is F.linear  # `Head` takes nothing else
        waiting, weight, bias = args
        return chunked_cross_entropy(weight, bias, *waiting._given)


class Logits:
    """The logits of hidden states [..., features], which are not there."""

    def __init__(self, head: Head, hidden: Tensor) -> None:
        self._head, self._hidden, self._refuse = head, hidden, head.refuse
        self.device, self.dtype = hidden.device, hidden.dtype
        self.shape = torch.Size((*hidden.shape[:-1], head.classes))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> Logits:
        """As they are: the loss is computed in float32."""
        return self

    def contiguous(self) -> Logits:
        return self

    def view(self, *shape: Any) -> Logits:
        sizes = tuple(shape[0]) if isinstance(shape[0], Sequence) else shape
        if sizes[-1] != self._head.classes:
            self._refuse(f"reshapes its logits to {list(sizes)}")
        return Logits(self._head, self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if end_dim in (-1, len(self.shape) - 1):
            self._refuse("flattens the classes of its logits")
        return Logits(self._head, self._hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Logits:
        parts = index if isinstance(index, tuple) else (index,)
        cuts = [part for part in parts if part is not Ellipsis]
        keeps = len(cuts) < len(self.shape) and (len(cuts) == len(parts) or parts[-1] is Ellipsis)
        if not all(isinstance(cut, slice) for cut in cuts) or not (keeps or cuts[-1] == slice(None)):
            self._refuse(f"takes the part [{index}] of its logits")
        return Logits(self._head, self._hidden[index])

    def _compute(self, *_: object) -> NoReturn:
        self._refuse("scales, caps or shifts its logits, or computes something else with them")

    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = __neg__ = __setitem__ = _compute
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _compute

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"asks for {name!r} of its logits")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is F.cross_entropy and isinstance(args[0], cls):
            return args[0]._loss(*args[1:], **given)
        logits = next(each for each in flatten((args, given))[0] if isinstance(each, cls))
        logits._refuse(f"calls {getattr(function, '__name__', function)}() with its logits")

    def _loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Tensor:
        plain = weight is size_average is reduce is None and not label_smoothing and reduction in ("mean", "sum")
        if not plain or len(self.shape) != 2 or target.shape != self.shape[:1] or target.dtype != torch.int64:
            self._refuse("calls cross_entropy() otherwise than for the mean or sum of [tokens, classes] and [tokens]")
        return self._head.loss(self._hidden, target, ignore_index, reduction == "mean")


def chunked_cross_entropy(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, labels: Tensor, ignored: int, mean: bool
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ignore_index=ignored)`, the mean or the sum.

    hidden: [tokens, features]. The forward computes the gradients as well, chunk by chunk, so that nothing is gathered
    or computed again. They serve one backward.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        found: Tensor = _Chunked.apply(hidden, weight, bias, labels, ignored, mean)
        return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, mean: bool
    ) -> Tensor:
        wide, needed = torch.promote_types(hidden.dtype, torch.float32), ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        of_weight = torch.zeros_like(weight) if needed[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        loss, tokens = hidden.new_zeros((), dtype=wide), max(1, BYTES // (4 * weight.shape[0]))
        for start in range(0, len(hidden), tokens):
            here = slice(start, start + tokens)
            inputs, targets, counted = hidden[here], labels[here], labels[here] != ignored
            scores = F.linear(inputs, weight, bias).log_softmax(-1, dtype=wide)
            loss += F.nll_loss(scores, targets, ignore_index=ignored, reduction="sum")
            error, counts = scores.exp_(), counted.to(wide).unsqueeze(1)
            error.scatter_add_(1, targets.where(counted, 0).unsqueeze(1), -counts)
            error = error.mul_(counts).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(error, weight, out=of_hidden[here])
            if of_weight is not None:
                of_weight.addmm_(error.t(), inputs)
            if of_bias is not None:
                of_bias += error.sum(0)
            del scores, error  # before the next chunk's
        divisor = (labels != ignored).sum() if mean else labels.new_ones(())
        # Without any label the mean is NaN and its gradient zero, as PyTorch has it.
        ctx.save_for_backward(of_hidden, of_weight, of_bias, divisor.clamp(min=1))
        return loss / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, divisor = ctx.saved_tensors
        factor = grads[0] / divisor
        # In place, for want of memory: autograd refuses a second backward, since what it saved has changed.
        return (*(None if each is None else each.mul_(factor) for each in gradients), None, None, None)
