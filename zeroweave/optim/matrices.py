"""Whole matrices around an update: fragments travel to the matrix's owner, and come back when it was updated.

    in      each rank sends what it has of gradient, master and states of a matrix to the owner: one all-to-all a bucket
    update  the owner's optimizer has the matrix as one parameter, in its shape; no other rank's has it
    out     the owner sends each rank what is new of its fragments of master and states: one all-to-all a bucket

At rest nothing is whole, so what reads or writes states finds fragments, as of any other parameter. Buckets travel
in the order that the caller gives, which is the same on all ranks, and with them goes what all ranks know of each
other: which states a matrix has, and of which dtypes. They tell each other on the host when an optimizer has made
its first ones, when states were loaded, and with each update where one value, such as a step counter, belongs to a
whole matrix.

A message has its pieces matrix by matrix, of each: gradient (in only), master, states; a piece starts at 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from zeroweave._torch.foreach import foreach_copy_
from zeroweave.comm.transport import Messages, Pending, Transport
from zeroweave.errors import ParameterError
from zeroweave.layout import BucketLayout, Fragment, SlotKey, owners_of_whole, round_up
from zeroweave.optim.fragments import Fragments
from zeroweave.optim.states import Told, merged, tell, value_of
from zeroweave.ranks.control import Control
from zeroweave.runtime.bucket import Bucket

_ALIGN: Final = 16
"""Bytes; what the widest element wants."""

Known = dict[SlotKey, dict[Any, Told]]
"""What optimizers hold of matrices, by the key of the state; nothing of those of which they hold nothing yet."""
Role = Literal["gradient", "master", "state"]


class Whole(NamedTuple):
    """What is updated as wholes, and the ways between the ranks."""

    parameters: Set[int]
    """by `id`, the user's parameters that are"""
    transport: Transport
    control: Control


class Kind(NamedTuple):
    """One of the tensors that belong to the elements of a matrix."""

    role: Role
    key: Any
    """of the optimizer's state; None for gradient and master"""
    dtype: torch.dtype


class Cargo(NamedTuple):
    """What travels of one matrix of a bucket."""

    slot: int
    kinds: tuple[Kind, ...]


class Piece(NamedTuple):
    """What a message has of one kind of one matrix: its range in the parameter, and the byte at which it starts."""

    slot: int
    kind: Kind
    fragment: Fragment
    start: int

    def of(self, message: torch.Tensor) -> torch.Tensor:
        """The piece, 1-D, as it is in a message (uint8)."""
        nbytes = self.fragment.numel * self.kind.dtype.itemsize
        return message.narrow(0, self.start, nbytes).view(self.kind.dtype)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements, 1-D, of a contiguous tensor of the matrix's shape."""
        return whole.view(-1).narrow(0, self.fragment.offset, self.fragment.numel)


_T = TypeVar("_T")
_Source = Callable[[int, Piece], torch.Tensor]
"""What there is of a piece of a bucket, 1-D"""
_Loads = Sequence[tuple[Sequence[Piece], int]]
"""Messages by the other rank, with their bytes."""


def message(layout: BucketLayout, cargo: Iterable[Cargo], rank: int) -> tuple[tuple[Piece, ...], int]:
    """The pieces of the message between the owner of these matrices and `rank`, which has fragments; and its bytes."""
    pieces, end = [], 0
    for slot, kinds in cargo:
        fragment = layout.fragment(slot, layout.group_rank(rank))
        for kind in kinds if fragment.numel else ():
            pieces.append(Piece(slot, kind, fragment, end))
            end = round_up(end + fragment.numel * kind.dtype.itemsize, _ALIGN)
    return tuple(pieces), end


class Route(NamedTuple):
    """The messages of one bucket between this rank and each other, either way: an all-to-all goes in or out by it."""

    bucket: int
    payload: int
    """bytes of all messages of all ranks"""
    held: _Loads
    """by the owner's rank, what this one has fragments of"""
    owned: _Loads
    """by the holder's rank, what it has of this one's matrices"""


def route(layout: BucketLayout, cargo: Sequence[Cargo], owners: Mapping[SlotKey, int], rank: int, world: int) -> Route:
    """The way of what travels of a bucket, as `rank` of `world` sees it."""
    by_owner = [[each for each in cargo if owners[layout.id, each.slot] == owner] for owner in range(world)]
    payload = sum(message(layout, load, holder)[1] for load in by_owner for holder in range(world))
    held = tuple(message(layout, load, rank) for load in by_owner)
    owned = tuple(message(layout, by_owner[rank], holder) for holder in range(world))
    return Route(layout.id, payload, held, owned)


class Matrices:
    """The matrices of one engine that are updated as wholes; those of `owned` by this rank.

    `matrices`: those of `whole`, by the user's parameter. `members`: which optimizer a slot belongs to. Memory while
    buckets are updated: gradient, master and states of the own matrices of all of them, and messages of two buckets.
    """

    def __init__(
        self,
        whole: Whole,
        matrices: Iterable[SlotKey],
        buckets: Mapping[int, Bucket],
        fragments: Mapping[int, Fragments],
        members: Mapping[SlotKey, torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._transport, self._control = whole.transport, whole.control
        self._buckets, self._fragments, self._members = buckets, fragments, members
        self._device = device
        self.owners = owners_of_whole([bucket.layout for bucket in buckets.values()], matrices, whole.control.world)
        """the rank that updates each"""
        rank = whole.control.rank
        self.owned = {
            (bucket, slot): nn.Parameter(torch.empty(0, dtype=buckets[bucket].shard.dtype, device=device))
            for (bucket, slot), owner in self.owners.items()
            if owner == rank
        }
        """what this rank's optimizer steps: empty but for the time of an update"""
        self._known: Known | None = None
        """None: the ranks have not told each other yet, or others than updates have written states"""
        self._ways: dict[tuple[int, tuple[Cargo, ...]], Route] = {}

    def stepped(self, bucket: int, slot: int, fragment: nn.Parameter) -> nn.Parameter | None:
        """What a step sees of a parameter: the fragment, or the whole on its owner and nothing on other ranks."""
        return self.owned.get((bucket, slot)) if (bucket, slot) in self.owners else fragment

    def forget(self) -> None:
        """States were written by others than updates. On all ranks."""
        self._known = None
        self._ways.clear()

    @contextmanager
    @torch.no_grad()
    def gathered(self, buckets: Sequence[int], absent: Mapping[int, Set[int]]) -> Iterator[None]:
        """Inside, this rank's matrices of these buckets are whole; afterwards all fragments are what became of them.

        Collective; the buckets in the same order on all ranks. Those of `absent` have no gradient, and stay. The
        fragments have their gradients, and fragments and states are on the device. ParameterError on all ranks for
        states that cannot be cut.
        """
        slots = {bucket: sorted(slot for b, slot in self.owners if b == bucket) for bucket in buckets}
        matrices = [(bucket, slot) for bucket in buckets for slot in slots[bucket] if slot not in absent[bucket]]
        known = self._agreed()
        try:
            self._bring(self._routes(matrices, ("gradient", "master"), known), known)
            yield
            owned = {matrix: self._updated(matrix) for matrix in matrices if matrix in self.owned}
        finally:
            self._let_go(matrices)
        known = self._agreed_again(matrices, known, {p: _told(master, state) for p, (master, state) in owned.items()})
        self._take_back(self._routes(matrices, ("master",), known), owned)
        self._tell_fragments(matrices, known)

    # ------------------------------------------------------------------ what all ranks know
    def _agreed(self) -> Known:
        """What optimizers hold of each matrix; told by those that have fragments of it, if it is not known."""
        if self._known is None:
            fragments = {matrix: self._fragment(matrix) for matrix in self.owners}
            held = {matrix: self._members[matrix].state.get(p) for matrix, p in fragments.items() if p.numel()}
            self._known = self._tell(
                {matrix: _told(fragments[matrix], state) for matrix, state in held.items() if state}
            )
        return self._known

    def _agreed_again(self, matrices: Sequence[SlotKey], known: Known, mine: Known) -> Known:
        """What optimizers hold of each matrix now; told by the owners, if that may be something else than before."""
        if any(p not in known or any(told.kind == "whole" for told in known[p].values()) for p in matrices):
            known.update(self._tell(mine))
        elif changed := [matrix for matrix in mine if mine[matrix] != known[matrix]]:
            matrix = changed[0]
            raise ParameterError(
                f"[ZW302] the optimizer keeps something else of {self._name(matrix)} than after its first step: "
                f"{_words(mine[matrix])} instead of {_words(known[matrix])}; an optimizer of whole matrices keeps the "
                "same in each step"
            )
        return known

    def _tell(self, mine: dict[SlotKey, dict[Any, Told]]) -> dict[SlotKey, dict[Any, Told]]:
        """What all ranks tell, put together. ParameterError for what cannot be told."""
        ranks = self._control.all_gather_object(mine, "the states of whole matrices")
        found = {
            matrix: merged([one[matrix] for one in ranks if matrix in one]) for matrix in dict.fromkeys(chain(*ranks))
        }
        for matrix, told in found.items():
            if own := [key for key, entry in told.items() if entry.kind == "own"]:
                raise ParameterError(
                    f"[ZW302] the optimizer keeps {own[0]!r} of {self._name(matrix)}, which is neither of the "
                    "parameter's shape nor one value, and cannot be cut among the ranks"
                )
        return found

    def _name(self, matrix: SlotKey) -> str:
        bucket, slot = matrix
        return repr(self._buckets[bucket].layout.slots[slot].name)

    # ------------------------------------------------------------------ where it is
    def _fragment(self, matrix: SlotKey) -> nn.Parameter:
        bucket, slot = matrix
        return self._fragments[bucket].parameters[slot]

    def _updated(self, matrix: SlotKey) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Master and state of a matrix of this rank's, as the optimizer has left them; tensors are contiguous."""
        held = self._members[matrix].state.get(self.owned[matrix], {})
        state = {key: v.contiguous() if isinstance(v, torch.Tensor) else v for key, v in held.items()}
        return self.owned[matrix].detach().contiguous(), state

    def _of_fragment(self, bucket: int, piece: Piece) -> torch.Tensor:
        """A piece as this rank has it, 1-D. ParameterError for a state that was removed."""
        matrix = bucket, piece.slot
        fragment, (role, key, _) = self._fragment(matrix), piece.kind
        if role == "gradient":
            assert fragment.grad is not None
            return fragment.grad
        if role == "master":
            return fragment.detach()
        held = self._members[matrix].state.get(fragment, {})
        if key not in held:
            raise ParameterError(
                f"[ZW302] {key!r} of {self._name(matrix)} was there after the last step, and was taken out of the "
                "optimizer's state since; engine.optimizer.load_state_dict(...) changes the states of all ranks"
            )
        state: torch.Tensor = held[key]
        return state

    def _make_states(self, route: Route) -> None:
        """What comes back is kept, also where there was no state of that key so far."""
        for piece in chain.from_iterable(pieces for pieces, _ in route.held):
            fragment, (role, key, dtype) = self._fragment((route.bucket, piece.slot)), piece.kind
            held = self._members[route.bucket, piece.slot].state
            if role == "state" and key not in held.get(fragment, ()):
                held.setdefault(fragment, {})[key] = torch.empty_like(fragment, dtype=dtype, requires_grad=False)

    # ------------------------------------------------------------------ one update
    def _routes(self, matrices: Iterable[SlotKey], roles: Sequence[Role], known: Known) -> list[Route]:
        """The ways of these, bucket by bucket, with the states that are `known`."""
        cargos: dict[int, list[Cargo]] = {}
        for bucket, slot in matrices:
            dtype, told = self._buckets[bucket].shard.dtype, known.get((bucket, slot), {})
            kinds = [Kind(role, None, dtype) for role in roles]
            kinds += [Kind("state", key, e.dtype or dtype) for key, e in told.items() if e.kind == "cut"]
            cargos.setdefault(bucket, []).append(Cargo(slot, tuple(kinds)))
        return [self._route(bucket, tuple(cargo)) for bucket, cargo in cargos.items()]

    def _route(self, bucket: int, cargo: tuple[Cargo, ...]) -> Route:
        if (found := self._ways.get((bucket, cargo))) is None:
            layout, control = self._buckets[bucket].layout, self._control
            found = self._ways[bucket, cargo] = route(layout, cargo, self.owners, control.rank, control.world)
        return found

    def _send(
        self, bucket: int, payload: int, outgoing: _Loads, incoming: _Loads, source: _Source
    ) -> tuple[Pending, torch.Tensor]:
        """Begins to send what `source` has of each piece; what comes is in the tensor, see `_views`."""
        sent, received = ([nbytes for _, nbytes in loads] for loads in (outgoing, incoming))
        mine, out = (torch.empty(sum(n), dtype=torch.uint8, device=self._device) for n in (sent, received))
        _copy((view, source(bucket, piece)) for piece, view in _views(outgoing, mine))
        return self._transport.all_to_all(out, mine, Messages(bucket, payload, sent, received)), out

    def _bring(self, routes: Iterable[Route], known: Known) -> None:
        """This rank's matrices become whole."""
        sent = (
            (each, self._send(each.bucket, each.payload, each.held, each.owned, self._of_fragment)) for each in routes
        )
        for each, (pending, out) in _one_ahead(sent):
            pending.wait()
            slots = self._buckets[each.bucket].layout.slots
            wholes: dict[int, dict[Kind, torch.Tensor]] = {}
            for piece in chain.from_iterable(pieces for pieces, _ in each.owned):
                kinds = wholes.setdefault(piece.slot, {})
                if piece.kind not in kinds:
                    kinds[piece.kind] = torch.empty(slots[piece.slot].shape, dtype=piece.kind.dtype, device=out.device)
            _copy((p.part_of(wholes[p.slot][p.kind]), view) for p, view in _views(each.owned, out))
            for slot, kinds in wholes.items():
                self._fill((each.bucket, slot), kinds, known.get((each.bucket, slot), {}))

    def _fill(self, matrix: SlotKey, wholes: Mapping[Kind, torch.Tensor], told: Mapping[Any, Told]) -> None:
        parameter, by_key = self.owned[matrix], {(kind.role, kind.key): whole for kind, whole in wholes.items()}
        parameter.data, parameter.grad = by_key["master", None], by_key["gradient", None]
        if told:
            self._members[matrix].state[parameter] = {
                key: by_key["state", key] if entry.kind == "cut" else value_of(entry, parameter.device)
                for key, entry in told.items()
            }

    def _let_go(self, matrices: Iterable[SlotKey]) -> None:
        """Nothing is whole."""
        for matrix in matrices:
            if (parameter := self.owned.get(matrix)) is not None:
                self._members[matrix].state.pop(parameter, None)
                parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    def _take_back(
        self, routes: Iterable[Route], owned: Mapping[SlotKey, tuple[torch.Tensor, Mapping[Any, torch.Tensor]]]
    ) -> None:
        """The fragments of all ranks become what their owners have made."""

        def source(bucket: int, piece: Piece) -> torch.Tensor:
            master, state = owned[bucket, piece.slot]
            return piece.part_of(master if piece.kind.role == "master" else state[piece.kind.key])

        sent = ((each, self._send(each.bucket, each.payload, each.owned, each.held, source)) for each in routes)
        for each, (pending, out) in _one_ahead(sent):
            pending.wait()
            self._make_states(each)
            _copy((self._of_fragment(each.bucket, piece), view) for piece, view in _views(each.held, out))

    def _tell_fragments(self, matrices: Iterable[SlotKey], known: Known) -> None:
        """What belongs to a whole matrix is with each of its fragments."""
        for matrix in matrices:
            values = {key: entry for key, entry in known[matrix].items() if entry.kind == "whole"}
            if values and (fragment := self._fragment(matrix)).numel():
                held = self._members[matrix].state[fragment]
                held.update((key, value_of(entry, fragment.device)) for key, entry in values.items())


def _views(loads: _Loads, buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The pieces of messages that follow each other, and the memory of each."""
    start = 0
    for pieces, nbytes in loads:
        for piece in pieces:
            yield piece, piece.of(buffer.narrow(0, start, nbytes))
        start += nbytes


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the first of each pair what the second has."""
    if found := list(pairs):
        foreach_copy_(*zip(*found, strict=True))


def _one_ahead(begun: Iterable[_T]) -> Iterator[_T]:
    """The same; each only when the next one has begun."""
    before: list[_T] = []
    for each in begun:
        yield from before
        before = [each]
    yield from before


def _told(parameter: torch.Tensor, state: Mapping[Any, Any]) -> dict[Any, Told]:
    """What the others have to know of what an optimizer keeps of a matrix, or of a fragment."""
    told = {key: tell({parameter: state}, parameter, key, value, False) for key, value in state.items()}
    return {key: t._replace(dtype=t.dtype or parameter.dtype) if t.kind == "cut" else t for key, t in told.items()}


def _words(told: Mapping[Any, Told]) -> str:
    return ", ".join(f"{key!r} ({entry.dtype or entry.kind})" for key, entry in told.items()) or "nothing"
