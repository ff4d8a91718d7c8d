"""An optimizer's state of whole parameters, and of fragments: taken by `initialize`, returned by `destroy`.

cut      a tensor of the parameter's shape: each rank has what belongs to its fragment
whole    one value for the parameter, such as a step counter: every rank that has something of the parameter has it
own      anything else: stays with the rank that has it, as it is
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from zeroweave.comm.transport import Transport
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout, SlotKey
from zeroweave.optim.fragments import Fragments
from zeroweave.optim.multi_optimizer import kind_of
from zeroweave.optim.state_memory import Need, Room, decide, shortage
from zeroweave.ranks.control import Control
from zeroweave.runtime.bucket import Bucket

States = dict[SlotKey, dict[str, Any]]
"""(bucket id, slot) -> what an optimizer holds of that parameter, or of this rank's fragment of it."""


Held = Mapping[Any, Mapping[str, Any]]
"""Parameter -> what an optimizer holds of it, whole; `optimizer.state` is one, and has keys of other kinds, too."""


class Told(NamedTuple):
    """What a rank tells the others of one value."""

    kind: Literal["cut", "whole", "own"]
    dtype: torch.dtype | None = None
    """of what is cut; None: that of the shard, because it is the parameter's where the parameter is whole"""
    value: Any = None
    """what is whole, on the CPU"""
    on_device: bool = False
    """true if it is in the memory that the engine computes in"""


class Described(NamedTuple):
    """What a rank tells the others of its optimizer before it is sharded."""

    kind: str
    groups: list[dict[str, Any]]
    """options that can be compared, and the names of the parameters"""
    states: dict[str, dict[str, Told]]
    """by the parameter's name"""


_Mine = Mapping[SlotKey, Mapping[str, Told]]
"""(bucket id, slot) -> what a rank's optimizer holds of its fragment"""


# ---------------------------------------------------------------------- of whole parameters
def uncuttable(held: Held, names: Mapping[int, str]) -> list[str]:
    """What of `held` cannot be cut into fragments, in words. `names`: by `id` of the parameter."""
    found = []
    for parameter, state in held.items():
        for key, value in state.items() if isinstance(parameter, torch.Tensor) else ():
            shapes = [list(tensor.shape) for tensor in tensors_in(value) if tensor.numel() > 1]
            if shapes and not (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
                name = names.get(id(parameter), "another model")
                found.append(f"{key!r} {shapes[0]} of {name} {list(parameter.shape)}")
    return found


def is_cut(parameter: torch.Tensor, key: str, value: Any, held: Iterable[tuple[Any, Mapping[str, Any]]]) -> bool:
    """True if `value` belongs to the elements of a parameter, or of a fragment, and not to it as a whole.

    Of one element a step counter may have the same shape. What is `held` of others, pairs that are looked at until one
    has such elements, tells then.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if parameter.numel() != 1:
        return True
    alone = True
    for p, state in held:
        v: Any = state.get(key)
        if isinstance(p, torch.Tensor) and p.shape != parameter.shape and hasattr(v, "shape"):
            if v.shape == p.shape:
                return True
            alone = False
    return alone and key != "step"


def describe(
    optimizer: torch.optim.Optimizer | None, named: Mapping[str, nn.Parameter], whole: Set[int] = frozenset()
) -> Described | None:
    """What the ranks have to know of each other's optimizers. Local. `whole`: see `agree`."""
    if optimizer is None:
        return None
    names = {id(parameter): name for name, parameter in named.items()}
    groups, states = [], {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        single = {key: v.item() for key, v in options.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
        plain = {key: value for key, value in (options | single).items() if _is_plain(value)}
        wholes = sorted(names[id(p)] for p in group["params"] if id(p) in whole)
        groups.append({**plain, "params": sorted(names[id(p)] for p in group["params"]), "whole matrices": wholes})
        on_device = counts_on_device(group)
        for p in group["params"]:
            if held := optimizer.state.get(p):
                states[names[id(p)]] = {
                    key: tell(optimizer.state, p, key, value, on_device) for key, value in held.items()
                }
    return Described(kind_of(optimizer), groups, states)


def agree(
    control: Control, optimizer: torch.optim.Optimizer | None, named: Mapping[str, nn.Parameter], whole: Set[int]
) -> list[Described | None]:
    """What each rank holds. Collective. EngineError on all ranks where optimizers or the options of groups differ.

    `whole`: by `id`, the parameters that are updated as wholes.
    """
    told: list[Described | None] = control.all_gather_object(describe(optimizer, named, whole), "the optimizers")
    first = told[0]
    for rank, other in enumerate(told):
        kinds = ["no optimizer" if one is None else one.kind for one in (first, other)]
        if kinds[0] != kinds[1]:
            raise EngineError(
                f"[ZW504] the ranks have different optimizers: {kinds[0]} on rank 0, {kinds[1]} on rank {rank}"
            )
        if first is None or other is None:
            continue
        if len(first.groups) != len(other.groups):
            raise EngineError(
                f"[ZW504] the optimizers have {len(first.groups)} groups on rank 0 and {len(other.groups)} on rank "
                f"{rank}"
            )
        for index, (a, b) in enumerate(zip(first.groups, other.groups, strict=True)):
            for key in a.keys() | b.keys():
                if a.get(key) != b.get(key):
                    raise EngineError(
                        f"[ZW504] the optimizer's param_groups[{index}][{key!r}] differ: {a.get(key)} on rank 0, "
                        f"{b.get(key)} on rank {rank}; give all ranks the same (load a checkpoint on all of them)"
                    )
    return told


@torch.no_grad()
def take(
    held: Held,
    buckets: Iterable[Bucket],
    named: Mapping[str, nn.Parameter],
    told: Sequence[Described | None],
    transport: Transport,
    device: torch.device,
    home: Callable[[int], torch.device],
) -> States:
    """What the optimizer is to hold of this rank's fragments; what the first rank of each sharding group has counts.

    Collective: each kind of state is broadcast bucket by bucket, through `device`. What is cut goes to `home` of the
    bucket. Of empty fragments there is nothing. `told` is what `agree` has returned. `held`, this rank's own, is not
    changed.
    """
    states: States = {}
    for bucket in buckets:
        layout = bucket.layout
        if not layout.trainable:
            continue
        source = layout.number(transport.rank)  # the rank of the group's number is the first in it
        theirs = told[source]
        assert theirs is not None
        found = [theirs.states.get(slot.name, {}) for slot in layout.slots]
        cut: dict[tuple[int, str], torch.Tensor] = {}
        every = (one.states.get(slot.name, {}) for one in told if one is not None for slot in layout.slots)
        for key, dtype, mine in _kinds(every, found, bucket.shard.dtype):
            flat = torch.zeros(layout.numel, dtype=dtype, device=device)
            views = bucket.views(flat)
            for i in mine if transport.rank == source else ():
                views[i].copy_(held[named[layout.slots[i].name]][key])
            transport.broadcast(flat.view(torch.uint8), group=layout.everywhere)  # gloo does not know all dtypes
            shard = bucket.slice(flat).to(home(layout.id), copy=True)
            cut.update(((i, key), bucket.fragment(shard, i)) for i in mine)
            del flat, views, shard  # before the next ones are made
        for i, state in enumerate(found):
            if state and layout.fragment(i, bucket.rank).numel:
                own = held.get(named[layout.slots[i].name], {})
                states[layout.id, i] = _taken(state, {key: cut.get((i, key)) for key in state}, own, device)
    return states


# ---------------------------------------------------------------------- of fragments
class Gathered(NamedTuple):
    """What `gather` has got. Equal on all ranks but for what belongs to each alone."""

    states: States
    lacking: str | None = None
    """why there is nothing, in words"""


class _Kind(NamedTuple):
    """What a bucket's slots have of one key and dtype, to be gathered at once."""

    key: str
    dtype: torch.dtype
    slots: tuple[int, ...]


@torch.no_grad()
def gather(
    outline_of: Callable[[int, int], Mapping[str, Any]],
    cut_of: Callable[[int, int], Set[str]],
    value_of: Callable[[int, int, str], Any],
    buckets: Mapping[int, Bucket],
    fragments: Mapping[int, Fragments],
    transport: Transport,
    control: Control,
    device: torch.device,
    room: Room | None,
) -> Gathered:
    """What the optimizers of all ranks hold, of whole parameters, on every rank. Collective; changes nothing.

    `room`: what this rank has; where there is room for the states of all ranks they are on `device`, else in host
    memory, else there are none. None: rank 0 alone gets all of them, in host memory. Each kind of state is gathered
    bucket by bucket on `device`, and then moves to its place. What belongs to the rank alone is in it as it is.
    `outline_of(bucket, slot)`: what the optimizer of this rank holds of a fragment, perhaps without the values of what
    is cut; `cut_of(bucket, slot)`: the keys of that; `value_of(bucket, slot, key)`: such a value, which is asked for
    once, and let go.
    """
    mine = {
        (bucket, slot): _tell_fragment(outline_of(bucket, slot), cut_of(bucket, slot))
        for bucket in buckets
        for slot, parameter in enumerate(fragments[bucket].parameters)
        if parameter.numel()
    }
    ranks = control.all_gather_object((mine, room), "the optimizer's state")
    told, rooms = [mine for mine, _ in ranks], [room for _, room in ranks if room is not None]
    host = torch.device("cpu")
    home, home_of_scalars, wanted = host, host, control.rank == 0
    if rooms:
        needs = _needs(told, buckets)
        memory = decide(rooms, needs)
        if memory is None:
            return Gathered({}, f"no memory has room: {shortage(rooms, needs)}")
        home, home_of_scalars, wanted = device if memory == "device" else host, device, True
    states: States = {}
    for id, bucket in buckets.items():
        layout = bucket.layout
        found = _found(told, layout, transport.rank)
        whole: dict[tuple[int, str], torch.Tensor] = {}
        for key, dtype, slots in _to_gather(told, bucket, found):
            shard = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
            for i in slots:
                if (id, i) in mine and (value := value_of(id, i, key)) is not None:
                    bucket.fragment(shard, i).copy_(value)
            flat = torch.empty(layout.numel, dtype=dtype, device=device)
            transport.all_gather(flat, shard, layout).wait()
            views = bucket.views(flat)
            whole.update(((i, key), views[i].to(home, copy=True)) for i in (slots if wanted else ()))
            del shard, flat, views  # before the next ones are made
        for i, state in enumerate(found if wanted else ()):
            if state:
                gathered = {key: whole.get((i, key)) for key in state}
                own = outline_of(id, i) if (id, i) in mine else {}
                states[id, i] = _taken(state, gathered, own, home_of_scalars)
    return Gathered(states)


def _found(told: Sequence[_Mine], layout: BucketLayout, rank: int) -> list[dict[str, Told]]:
    """By slot: what the optimizers of that rank's sharding group hold."""
    number = layout.number(rank)
    group = [one for other, one in enumerate(told) if layout.number(other) == number]
    return [merged([one.get((layout.id, slot), {}) for one in group]) for slot in range(len(layout.slots))]


def _to_gather(told: Sequence[_Mine], bucket: Bucket, found: Sequence[Mapping[str, Told]]) -> list[_Kind]:
    every = (one.get((bucket.layout.id, slot), {}) for one in told for slot in range(len(bucket.layout.slots)))
    return _kinds(every, found, bucket.shard.dtype)


def _needs(told: Sequence[_Mine], buckets: Mapping[int, Bucket]) -> list[Need]:
    """The memory that each rank needs for the states of whole parameters, by rank."""
    kept: list[list[int]] = [[] for _ in told]
    gathered: list[int] = []
    for bucket in buckets.values():
        layout = bucket.layout
        groups = [_to_gather(told, bucket, _found(told, layout, first)) for first in range(layout.groups)]
        gathered += [(layout.numel + layout.shard_numel) * kind.dtype.itemsize for kind in groups[0]]
        for rank, mine in enumerate(kept):
            for _, dtype, slots in groups[layout.number(rank)]:
                mine += [layout.slots[i].numel * dtype.itemsize for i in slots]
    return [Need.of(mine, gathered) for mine in kept]


# ---------------------------------------------------------------------- inside
def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a value of an optimizer's state, at any depth."""
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple() | set():
            for item in value:
                yield from tensors_in(item)
        case dict():
            yield from tensors_in(list(value.values()))


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """True if an optimizer wants the step counters of a group on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _is_plain(value: Any) -> bool:
    """True if it can be sent and compared."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | str | bytes | numbers.Number)


def tell(held: Held, parameter: torch.Tensor, key: str, value: Any, on_device: bool) -> Told:
    """What the others have to know of `value`, which is `held` of a whole parameter."""
    if is_cut(parameter, key, value, held.items()):
        return Told("cut", None if value.dtype == parameter.dtype else value.dtype)
    here = isinstance(value, torch.Tensor) and value.device == parameter.device
    return _tell_whole(value, on_device or (here and parameter.device.type != "cpu"))


def _tell_fragment(held: Mapping[str, Any], cut: Set[str]) -> dict[str, Told]:
    return {
        key: Told("cut", value.dtype)
        if key in cut
        else _tell_whole(value, isinstance(value, torch.Tensor) and value.device.type != "cpu")
        for key, value in held.items()
    }


def _tell_whole(value: Any, on_device: bool) -> Told:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return Told("whole", value=value.detach().cpu(), on_device=on_device)
    return Told("whole", value=value) if _is_plain(value) else Told("own")


def merged(told: Sequence[Mapping[str, Told]]) -> dict[str, Told]:
    """What the ranks of a group say of one parameter. Of one element both shapes are the same: the others know then."""
    merged: dict[str, Told] = {}
    for one in told:
        for key, entry in one.items():
            if key not in merged or (merged[key].kind == "cut" and entry.kind != "cut"):
                merged[key] = entry
    return merged


def _kinds(
    told: Iterable[Mapping[str, Told]], found: Sequence[Mapping[str, Told]], default: torch.dtype
) -> list[_Kind]:
    """What is cut, in one order on all ranks, in whichever group a rank has it; the slots are those of `found`."""

    def cut(held: Mapping[str, Told]) -> set[tuple[str, torch.dtype]]:
        return {(key, entry.dtype or default) for key, entry in held.items() if entry.kind == "cut"}

    slots = [cut(held) for held in found]
    kinds = sorted(set().union(*map(cut, told)), key=lambda kind: (kind[0], str(kind[1])))
    return [_Kind(*kind, tuple(i for i, held in enumerate(slots) if kind in held)) for kind in kinds]


def _taken(
    told: Mapping[str, Told], cut: Mapping[str, torch.Tensor | None], own: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """The state of one parameter or fragment, in the order of `told`."""
    state: dict[str, Any] = {}
    for key, entry in told.items():
        if entry.kind == "cut":
            state[key] = cut[key]
        elif entry.kind == "own":
            if key in own:
                state[key] = own[key]
        else:
            state[key] = value_of(entry, device)
    return state


def value_of(entry: Told, device: torch.device) -> Any:
    """A copy of a value that belongs to a parameter as a whole."""
    if isinstance(entry.value, torch.Tensor):
        return entry.value.to(device if entry.on_device else "cpu", copy=True)
    return copy.copy(entry.value)
