"""Copies of a device's tensors in host memory, from which they come back many times: pinned, as far as that goes.

blocks    | a        | a b        | c        |    pinned, of one size: a tensor may lie in several
beside    d                                       what is not contiguous, and what no block was left for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from zeroweave.layout import round_up
from zeroweave.optim.room import available

_BLOCK: Final = 1 << 28
"""Bytes, a power of two: to that PyTorch rounds each allocation of pinned memory."""
_LEFT: Final = 16
"""So many blocks are left for whatever else is on the machine: what is pinned cannot be swapped out."""
_ALIGNED: Final = 512

Block = Callable[[], torch.Tensor | None]
"""Makes uint8 [bytes] in host memory; None: there is no more."""


def pinned_block(nbytes: int = _BLOCK, left: int = _LEFT * _BLOCK) -> torch.Tensor | None:
    """uint8 [nbytes], pinned; None where that fails, or less than `left` would be left on the machine."""
    if available() < nbytes + left:
        return None
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None


class Away:
    """Makes copies in host memory. Each is there when `copy` returns. In blocks lies what comes from such a device."""

    def __init__(self, device: torch.device, block: Block = pinned_block) -> None:
        self._device, self._block = device, block
        self._rest: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
        """of the last block; None: there are no more"""

    def copy(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A copy: one tensor like it, or what it consists of, 1-D, one behind the other. See `put_back`."""
        tensor = tensor.detach()
        if tensor.device.type != self._device.type or not tensor.is_contiguous() or not tensor.numel():
            return [tensor.to("cpu", copy=True)]
        pieces: list[torch.Tensor] = []
        flat = tensor.view(-1)
        while len(flat):
            room = self._room(flat.itemsize)
            if room is None:
                pieces.append(flat.to("cpu", copy=True))
                break
            count = min(len(flat), len(room) // flat.itemsize)
            piece = room[: count * flat.itemsize].view(flat.dtype)
            pieces.append(piece.copy_(flat[:count]))
            self._rest = room[round_up(piece.nbytes, _ALIGNED) :]
            flat = flat[count:]
        return pieces if len(pieces) > 1 else [piece.view(tensor.shape) for piece in pieces]

    def _room(self, itemsize: int) -> torch.Tensor | None:
        """For one element at least."""
        if self._rest is not None and len(self._rest) < itemsize:
            self._rest = self._block()
        return self._rest


def put_back(tensor: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """A tensor has the contents of its copy again. Returns when the pieces have been read."""
    if len(pieces) == 1:
        tensor.copy_(pieces[0])
    elif tensor.is_contiguous():
        for part, piece in zip(tensor.view(-1).split([len(piece) for piece in pieces]), pieces, strict=True):
            part.copy_(piece)
    else:
        tensor.copy_(torch.cat(list(pieces)).view(tensor.shape))
