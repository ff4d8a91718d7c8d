"""Clipping by the global norm, on gradient shards. No host synchronisation anywhere.

Shards are disjoint and their padding is zero, so the squares of the local norms add up over the ranks.
The coefficient differs from that of `torch.nn.utils.clip_grad_norm_` in its last bits, because torch takes
the norm of per-parameter norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def sum_of_squares(norms: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """The sum of squares of all elements on this rank, by the norms of their tensors: fp64, 0-dim, on their device.

    Squares are added in fp64, where they neither overflow nor depend on the number of buckets and ranks in the digits
    that fp32 shows. Infinities and NaNs pass through. `device` is that of the zero of an empty list.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()


def total_norm(local: torch.Tensor, all_reduce: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """The global 2-norm, fp32, 0-dim. `all_reduce` sums a copy of `local` over the ranks, in place."""
    total = local.clone()
    all_reduce(total)
    return total.sqrt().float()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by to have at most `max_norm`: fp32, 0-dim, at most 1, as in torch.

    Of a norm that is not finite it is 0 or NaN, as in torch; a caller that skips such steps looks at the norm.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
