"""Where the program's own operations meet those of a graph: gradients of outputs come in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from zeroweave._torch.autograd import keeps_graph

Arrive = Callable[[Sequence[torch.Tensor | None]], None]
TWICE: Final = "Trying to backward through the graph a second time: the first one must be told retain_graph=True"


class _Edge(torch.autograd.Function):
    """Hands outputs on, and tells of their gradients as they come back: all at once, None where there is none."""

    @staticmethod
    def forward(ctx: Any, arrive: Arrive, anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)
        # Of outputs that share memory, one that is written in place would change the others' gradients: an error.
        shared = Counter(output.untyped_storage().data_ptr() for output in outputs)
        return tuple(
            _alias(output) if shared[output.untyped_storage().data_ptr()] == 1 else output.view_as(output)
            for output in outputs
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.arrive(gradients)
        return (None,) * (2 + len(gradients))


def _alias(output: torch.Tensor) -> torch.Tensor:
    """The same memory, as no view of anything: programs write in place what a model returns, as in ``loss /= 2``."""
    alias = torch.empty(0, dtype=output.dtype, device=output.device)
    return alias.set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())


def go_on(
    roots: list[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    backward: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], bool], object],
) -> None:
    """The backward goes on from `roots`, whose gradients these are. Forgets them, unless the graph is to be kept."""
    if not roots:
        raise RuntimeError(TWICE)
    which = [index for index, gradient in enumerate(gradients) if gradient is not None]
    keep = keeps_graph()
    with torch.enable_grad():
        backward([roots[index] for index in which], [g for g in gradients if g is not None], keep)
    if not keep:
        roots.clear()


def waiting(outputs: Sequence[torch.Tensor], trained: Sequence[int], arrive: Arrive) -> list[torch.Tensor]:
    """The outputs, none of which has a way back. To those at the indices `trained` a backward can come: to `arrive`."""
    if not trained:
        return list(outputs)
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    taken = _Edge.apply(arrive, anchor, *(outputs[index] for index in trained))
    found = dict(zip(trained, taken, strict=True))
    return [found.get(index, output) for index, output in enumerate(outputs)]
