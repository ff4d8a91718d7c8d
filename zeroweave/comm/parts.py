"""Gradients on their way into a reduction, and the flat that they are reduced in."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from zeroweave._torch.foreach import foreach_copy_
from zeroweave.comm.transport import Parts, Spread


def lay_out(flat: torch.Tensor, parts: Parts, layout: Spread, there: Set[int] = frozenset()) -> None:
    """Copies `parts` into their places in `flat` [numel], with zeros elsewhere.

    The slots of `there` are in their places already.
    """
    if isinstance(parts, torch.Tensor):
        flat.copy_(parts)
        return
    views: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    for piece in layout.pieces:
        if piece.slot in there:
            continue
        view = flat.narrow(0, piece.offset, piece.numel)
        if (part := parts.get(piece.slot)) is None:
            view.zero_()
        elif part.numel() == piece.numel:
            views.append(view if part.dim() == 1 else view.view_as(part))
            tensors.append(part)
        else:
            views.append(view)
            tensors.append(part.reshape(-1).narrow(0, piece.start, piece.numel))
    if views:
        foreach_copy_(views, tensors)


def tensors_of(parts: Parts) -> Iterable[torch.Tensor]:
    """The tensors that must stay alive while the parts are reduced."""
    return (parts,) if isinstance(parts, torch.Tensor) else parts.values()
