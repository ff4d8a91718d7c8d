"""One launch for many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target. Why: one launch for a bucket's gradients instead of one each."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_add_(targets: Sequence[torch.Tensor], terms: Sequence[torch.Tensor] | float) -> None:
    """Adds each term to its target, or one number to all. Why: as `foreach_copy_`."""
    torch._foreach_add_(list(targets), terms if isinstance(terms, float) else list(terms))


def foreach_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, 0-dim: fp64 where it is, which PyTorch does not narrow, else fp32.

    Why: one launch for each of both, and the public form rounds to bf16.
    """
    kinds = [torch.float64 if tensor.dtype == torch.float64 else torch.float32 for tensor in tensors]
    alike = {kind: [t for t, of in zip(tensors, kinds, strict=True) if of is kind] for kind in {*kinds}}
    norms = {kind: iter(torch._foreach_norm(group, 2, dtype=kind)) for kind, group in alike.items()}
    return [next(norms[kind]) for kind in kinds]


def foreach_maxima(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each tensor, fp64, 0-dim; NaN where one is. Why: one launch, one reading pass."""
    return [maximum.double() for maximum in torch._foreach_norm(list(tensors), float("inf"))]
