"""Full values out of shards, and back: gathers, writes that are kept, state dicts.

Everything here is collective and works between a forward and a backward as well as between steps.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeroweave.comm.rounding import cast, cast_
from zeroweave.engine.parts import EngineParts
from zeroweave.errors import EngineError, ParameterError
from zeroweave.layout import Slot
from zeroweave.parameters.places import Places
from zeroweave.ranks.control import Control
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime


@torch.no_grad()
def full_values(runtime: Runtime, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """All parameters, full, from the masters, in the given dtypes, on the device. Beside them one bucket at a time."""
    values: dict[str, torch.Tensor] = {}
    for bucket in runtime.buckets.values():
        views = gather_like(runtime, bucket, bucket.values())
        pairs = zip(bucket.layout.slots, views, strict=True)
        for slot, view in pairs:
            values[slot.name] = cast_(torch.empty_like(view, dtype=dtypes[slot.name]), view)
        del views, pairs, view  # before the next bucket is gathered
    return values


def gather_like(runtime: Runtime, bucket: Bucket, shard: torch.Tensor) -> list[torch.Tensor]:
    """Views of the full values of a tensor that is sharded like the bucket, by slot."""
    return bucket.views(_gather(runtime, bucket, shard))


@torch.no_grad()
def _gather(runtime: Runtime, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
    full = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=shard.device)
    runtime.transport.all_gather(full, shard, bucket.layout).wait()
    return full


def _each_group(runtime: Runtime, bucket: Bucket) -> Iterator[torch.Tensor]:
    """The master values [numel] of the bucket in each of its sharding groups, by the group's number. Collective.

    Groups but the first send theirs to all ranks: the rank of the group's number, which is the first in it, does.
    """
    own = _gather(runtime, bucket, bucket.values())
    for number in range(bucket.layout.groups):
        flat = own if number == bucket.number else torch.empty_like(own)
        if number:
            runtime.transport.broadcast(flat, source=number)
        yield flat


def absent_gradients(runtime: Runtime, control: Control) -> dict[int, frozenset[int]]:
    """For each trainable bucket the slots that no rank has had a gradient for in the window."""
    ranks = control.all_gather_bytes(runtime.gradients.had_gradient(), "which gradients exist")
    return runtime.gradients.absent(bytes(any(flags) for flags in zip(*ranks, strict=True)))


@torch.no_grad()
def full_gradients(
    runtime: Runtime, control: Control, look: Callable[[int], torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """The window's reduced gradients, full, float32, on the CPU; None where no rank had one.

    `look(bucket id)` gives this rank's shard of them. All are settled.
    """
    result: dict[str, torch.Tensor | None] = {}
    for bucket_id, missing in absent_gradients(runtime, control).items():
        bucket = runtime.buckets[bucket_id]
        shard = look(bucket_id)
        views = None if shard is None else gather_like(runtime, bucket, shard.float())
        for index, slot in enumerate(bucket.layout.slots):
            result[slot.name] = None if views is None or index in missing else views[index].cpu().clone()
    return result


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that state dicts have, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def state_dict(parts: EngineParts) -> dict[str, torch.Tensor]:
    """What `stream` yields, parameters in the model's order."""
    values = dict(stream(parts))
    if not values:
        return {}
    ordered = {key: values.pop(key) for keys in _keys(parts).values() for key in keys}
    return ordered | values


def _keys(parts: EngineParts) -> dict[str, tuple[str, ...]]:
    """The keys in state dicts of each parameter's names, in the model's order; see `BucketLayout.keys`.

    Without the names that were added to a parameter since then.
    """
    buckets, places = parts.runtime.buckets, parts.runtime.directory.places
    names = [name for name, _ in parts.model.named_parameters(remove_duplicate=False)]
    whose = {name: parts.places.aliases.get(name, name) for name in names}
    return {name: buckets[places[own][0]].layout.keys(name) for name, own in whose.items() if own in places}


def stream(parts: EngineParts) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Full parameters (tied ones under each name) and persistent buffers on the CPU of rank 0; nothing elsewhere.

    One bucket is gathered at a time; where each of several groups has its own, each group's in turn. Who leaves early
    takes part in the other gathers all the same.
    """
    names = _all_names(parts)
    wanted = parts.control.rank == 0
    for bucket in parts.runtime.buckets.values():
        for number, flat in enumerate(_each_group(parts.runtime, bucket)):
            views = bucket.views(flat)
            for slot, view in zip(bucket.layout.slots, views, strict=True) if wanted else ():
                value = cast(view, parts.original_dtypes[slot.name]).to("cpu", copy=True)
                try:
                    for name in names[slot.name]:
                        yield bucket.layout.keys(name)[number], value
                except GeneratorExit:
                    wanted = False
                    break
            del views, flat
    if wanted:
        for name, buffer in persistent_buffers(parts.model):
            yield name, buffer.detach().to("cpu", copy=True)


def listed(parts: EngineParts) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of all that `stream` yields, in its order. Local."""
    for key, _, slot in keys(parts):
        yield key, slot.shape, parts.original_dtypes[slot.name]
    for name, buffer in persistent_buffers(parts.model):
        yield name, tuple(buffer.shape), buffer.dtype


def keys(parts: EngineParts) -> Iterator[tuple[str, str, Slot]]:
    """Each key of a parameter in state dicts, that of its canonical name, and its slot; as `stream` has them. Local."""
    names = _all_names(parts)
    for bucket in parts.runtime.buckets.values():
        for number in range(bucket.layout.groups):
            for slot in bucket.layout.slots:
                for name in names[slot.name]:
                    yield bucket.layout.keys(name)[number], bucket.layout.keys(slot.name)[number], slot


def _all_names(parts: EngineParts) -> dict[str, list[str]]:
    """Canonical name -> all names of the parameter, that one first. ParameterError where others have come."""
    parts.places.check()
    names = {name: [name] for name in parts.places.names}
    for alias, name in parts.places.aliases.items():
        names[name].append(alias)
    return names


def agree_on_state(
    name: str, key: str, held: Mapping[str, Any], cut: bool, numel: int, control: Control, groups: int = 1
) -> tuple[torch.Tensor, bool]:
    """What its ranks know of the state `key` of parameter `name`, of which this one holds `held`. Collective.

    This rank's part [numel], zeros if it holds none; or, as is told with it, one value for the whole parameter, such as
    a step counter. `cut`: this rank holds one for each of the `numel` elements of its fragment. `groups`: how many
    sharding groups have a parameter of this name. EngineError on all ranks where one of these holds nothing.
    """
    value = held.get(key)
    mine = value if cut else None
    whole = None if value is None or mine is not None else torch.as_tensor(value, device="cpu").detach()
    dtype = None if mine is None else mine.dtype
    ranks = control.all_gather_object((dtype, whole, sorted(map(str, held))), f"{key} of {name}")
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for rank, (theirs, value, _) in enumerate(ranks):
        if value is not None:
            found.setdefault(rank % groups, (value, True))
        elif theirs is not None:
            part = torch.zeros(numel, dtype=theirs, device="cpu") if mine is None else mine
            found.setdefault(rank % groups, (part, False))
    if len(found) == groups:
        return found[control.rank % groups]
    known = sorted({known for _, _, names in ranks for known in names})
    raise EngineError(
        f"the optimizer holds no {key!r} of {name!r}; "
        + (f"it holds {', '.join(known)}" if known else "it holds nothing of it before its first step with a gradient")
    )


def name_of(parameter: nn.Parameter | str, model: nn.Module, places: Places) -> str:
    """The canonical name of a parameter that is given by one of its names or as the user's object."""
    if isinstance(parameter, str):
        name = places.aliases.get(parameter, parameter)
        if name in places.names:
            return name
        near = difflib.get_close_matches(parameter, places.names, n=1)
        raise EngineError(
            f"the model has no parameter {parameter!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    for named in (places.names.items(), model.named_parameters()):  # the user's own objects; those shown now
        for name, known in named:
            if known is parameter:
                return name
    raise EngineError(f"a parameter of shape {list(parameter.shape)} is none of the model's")


@torch.no_grad()
def load_state_dict(given: Mapping[str, torch.Tensor], parts: EngineParts) -> None:
    """Rank 0's full values into every rank's shards, masters and buffers. All or nothing."""
    runtime, buffers = parts.runtime, dict(persistent_buffers(parts.model))
    layouts = [bucket.layout for bucket in runtime.buckets.values()]
    shapes = {key: slot.shape for each in layouts for slot in each.slots for key in each.keys(slot.name)}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    known = {key for key, _, _ in keys(parts)}
    problems = None
    if parts.control.rank == 0:
        present = set(given)  # asking `given` itself might read a tensor each time
        missing = sorted(shapes.keys() - present)
        unknown = sorted(present - known - buffers.keys())
        wrong = [
            f"{name}: {list(found)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in present and (found := tuple(given[name].shape)) != shape
        ]
        parts_of = {"missing": missing, "unknown": unknown, "of another shape": wrong}
        problems = "; ".join(f"{what}: {', '.join(which)}" for what, which in parts_of.items() if which)
    problems = parts.control.broadcast_object(problems, label="load_state_dict")
    if problems:
        raise ParameterError(f"the state dict does not fit the model, nothing was loaded: {problems}")
    for bucket in runtime.buckets.values():
        full = torch.zeros(bucket.layout.numel, dtype=bucket.shard.dtype, device=bucket.device)
        for number in range(bucket.layout.groups):
            if parts.control.rank == 0:
                for view, slot in zip(bucket.views(full), bucket.layout.slots, strict=True):
                    view.copy_(given[bucket.layout.keys(slot.name)[number]])
            runtime.transport.broadcast(full)
            if number == bucket.number:
                bucket.put(bucket.slice(full).clone())
        bucket.renew()
    for name, buffer in buffers.items():
        if parts.control.rank == 0:
            buffer.copy_(given[name])
        share(buffer, runtime)


def share(buffer: torch.Tensor, runtime: Runtime) -> None:
    """Rank 0's values of a buffer on all ranks."""
    plain = buffer.contiguous()
    runtime.transport.broadcast(plain.view(-1).view(torch.uint8))  # as bytes: gloo dies on dtypes that it does not know
    if plain is not buffer:
        buffer.copy_(plain)


def names_of(parts: EngineParts) -> dict[int, str]:
    """The canonical name of each of the user's parameters, by `id`."""
    return {id(parameter): name for name, parameter in parts.places.names.items()}
