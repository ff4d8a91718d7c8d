"""The one interface through which data crosses ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import torch

from zeroweave._torch.foreach import foreach_copy_
from zeroweave.comm.clock import Clock, Mark
from zeroweave.layout import WORLD, BucketLayout, Piece

ReduceOp = Literal["average", "predivide"]
Parts = Mapping[int, torch.Tensor] | torch.Tensor
"""One bucket's gradients on their way into a reduction: slot index -> tensor of the slot's shape, where a slot
without an entry contributes zeros; or the flat [numel] that holds them already, with zeros outside of slots. Such a
flat belongs to the reduction, which may overwrite it; single parts are read only."""


class Spread(Protocol):
    """How some tensors, the slots, are laid out in a flat [numel] whose chunk r belongs to rank r.

    A bucket's layout is one, with equal chunks and each slot in one piece; the reduce buckets of `dc` are others.
    `id` is for the ledger: equal on all ranks. `world` ranks share it, those of the sharding `group`; the r of a rank
    of the engine is its `group_rank` there.
    """

    @property
    def id(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def world(self) -> int: ...
    def group_rank(self, rank: int, /) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def chunks(self) -> Sequence[int]: ...
    @property
    def pieces(self) -> Sequence[Piece]: ...


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


class Messages(NamedTuple):
    """How an all-to-all is cut into messages between the ranks. All in bytes."""

    bucket: int
    """whose values they are"""
    payload: int
    """of all messages of all ranks, equal on all of them"""
    sent: Sequence[int]
    """by rank, what this one has for it"""
    received: Sequence[int]
    """and what it has for this one"""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Makes the current stream (on CPU: the caller) wait for the result. To be called exactly once."""

    def over(self, clock: Clock) -> Mark:
        """When the result is there, by `clock`. To be called before `wait`; it does not wait itself."""


class Gatherer(Protocol):
    """A transport, or another object that gathers flats, such as one that uploads shards first."""

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        """Fills `flat` [numel] with every rank's `shard` [numel / world], in rank order, cast to its dtype."""


class Transport(Gatherer, Protocol):
    """Asynchronous collectives over the ranks of an engine, each in the sharding group of its layout.

    All ranks issue the same collectives in the same order. Tensors that are handed in stay alive until `wait`
    (the implementation keeps references), and must not be written before. `rank` and `world` are the engine's.
    """

    rank: int
    world: int

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D tensor for a shard; from here so that a transport can choose the kind of memory."""

    def together(self) -> AbstractContextManager[None]:
        """Inside, gathers only are issued: in one launch where the backend can.

        Equally on all ranks: NCCL hangs where one rank launches together what another launches one after the other.
        """

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        """Reduces the group's parts in the dtype of `out` and leaves this rank's chunk in `out`.

        The parts are summed over the group and divided by the number of all ranks, over which losses are averaged.
        `average` is the backend's average; `predivide` divides first and then sums, for dtypes whose sum could
        overflow. Padding and missing parts are zeros. Single parts are read only; a flat may be overwritten.
        """

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        """Like `reduce_scatter`, but leaves all of the reduced flat in `out` [numel] on every rank."""

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        """Sends each rank its message out of `mine`, and leaves what the ranks have sent in `out`; both uint8, 1-D.

        Messages follow one another without gaps, in rank order; one may be empty.
        """

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        """Overwrites `tensor` with that of rank `source` of this rank's sharding group; synchronous."""

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over the ranks, in place, on the current stream."""
