"""Where reduced gradients go when the caller brings the buffers: offsets, shares, and step-local partitions.

A *target* is one parameter's gradient buffer on this rank. It holds the whole gradient, or a *share* of it: a
range of the parameter's own flat gradient. The shares of all ranks cover it exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.errors import ParameterError
from zeroweave.layout import ALIGN_BYTES, WORLD, Piece, round_up, with_gaps


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `start` to `start + numel` of a parameter's flat gradient; (0, 0) where a rank holds nothing."""

    start: int
    numel: int


def even_shares(numel: int, world: int, size: int | None = None) -> tuple[Share, ...]:
    """Each rank's share of a gradient cut into `size` elements each, or evenly; the last are shorter, or empty."""
    size = -(-numel // world) if size is None else size
    starts = [min(rank * size, numel) for rank in range(world)]
    return tuple(Share(start, min(size, numel - start)) for start in starts)


def agree_on_shares(name: str, numel: int, held: Sequence[tuple[int, int]]) -> tuple[Share, ...] | None:
    """What each rank holds of a gradient of `numel` elements; None where every rank holds all of it.

    `held`: per rank (elements of its buffer, offset). A buffer that holds the whole gradient may be anywhere in
    the caller's memory, so its offset says nothing; a shorter one begins at element `offset` of the gradient.
    ParameterError, with `name`, where the shares leave gaps, overlap or reach too far.
    """
    if all(count == numel for count, _ in held):
        return None
    shares = [Share(0, numel) if count == numel else Share(at if count else 0, count) for count, at in held]
    ranges = sorted((share.start, share.start + share.numel) for share in shares if share.numel)
    ends, starts = [0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), numel]
    for end, start in zip(ends, starts, strict=True):
        if end != start:
            what = f"no rank holds elements {end} to {start}" if end < start else f"several ranks hold element {start}"
            raise ParameterError(f"{name}: the gradient buffers do not fit together: {what} of {numel}")
    return tuple(shares)


class SharesLayout:
    """A flat for the gradients of some parameters: chunk r holds rank r's shares, each padded to 128 bytes.

    Chunks are equal where that costs little, because collectives of equal chunks are faster. Built from
    `shares[slot][rank]`; where these are None every rank holds all of every slot, and so of the flat.
    """

    group = WORLD
    _SLACK = 1 / 8
    """how much longer equal chunks may make the flat"""

    def __init__(
        self, id: int, itemsize: int, world: int, numels: Sequence[int], shares: Sequence[tuple[Share, ...]] | None
    ) -> None:
        self.id, self.world = id, world
        align = ALIGN_BYTES // itemsize
        self.whole = shares is None
        if shares is None:
            per_rank = [[Share(0, numel) for numel in numels]]
        else:
            per_rank = [[share[rank] for share in shares] for rank in range(world)]
        sizes = [max(align, sum(round_up(share.numel, align) for share in held)) for held in per_rank]
        if max(sizes) * len(sizes) <= (1 + self._SLACK) * sum(sizes):
            sizes = [max(sizes)] * len(sizes)
        self.chunks: tuple[int, ...] = tuple(sizes)
        self.numel = sum(sizes)
        pieces: list[Piece] = []
        self._starts: list[dict[int, int]] = []
        begin = 0
        for size, held in zip(sizes, per_rank, strict=True):
            offset = 0
            self._starts.append({})
            for slot, share in enumerate(held):
                if share.numel:
                    pieces.append(Piece(slot, share.start, share.numel, begin + offset))
                    self._starts[-1][slot] = offset
                    offset += round_up(share.numel, align)
            begin += size
        self.pieces = with_gaps(pieces, self.numel)

    def group_rank(self, rank: int) -> int:
        """Of all ranks."""
        return rank

    def starts(self, rank: int) -> Mapping[int, int]:
        """slot -> where its share begins in what `rank` gets of a reduction; slots without a share are missing."""
        return self._starts[0 if self.whole else rank]


class GradientPartition:
    """All step-local gradients of this rank: float32 `flat` [numel], and its contents.

    `slices` maps a parameter's id to (offset in `flat`, first element of the parameter's own gradient, elements).
    The caller that takes it calls `release()` when the update is done. Made of (parameter id, this rank's share); the
    values are undefined at first. `gauge` counts the bytes.
    """

    def __init__(self, shares: Iterable[tuple[int, Share]], device: torch.device, gauge: Gauge) -> None:
        self.slices: dict[int, tuple[int, int, int]] = {}
        offset = 0
        for ds_id, share in shares:
            self.slices[ds_id] = (offset, share.start, share.numel)
            offset += round_up(share.numel, ALIGN_BYTES // torch.float32.itemsize)
        self.flat = torch.empty(offset, dtype=torch.float32, device=device)
        self._gauge = gauge
        gauge.add(self.flat.nbytes)

    def view(self, ds_id: int) -> torch.Tensor:
        """[elements] the part of one parameter's gradient that this rank holds."""
        offset, _, numel = self.slices[ds_id]
        return self.flat.narrow(0, offset, numel)

    def release(self) -> None:
        """Its memory is free now, views or not."""
        storage = self.flat.untyped_storage()
        self._gauge.add(-storage.nbytes())
        storage.resize_(0)
