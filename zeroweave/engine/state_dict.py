"""Full values out of shards, and back: state dicts, and what an engine hands back in the end.

Everything here is collective and works between a forward and a backward as well as between steps.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from zeroweave._torch.modules import shapes_state_dict
from zeroweave.comm.rounding import cast, cast_
from zeroweave.engine.context import EngineContext
from zeroweave.errors import ParameterError
from zeroweave.layout import BucketLayout, Slot
from zeroweave.parameters.foreign import is_foreign
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime

Lent: TypeAlias = Callable[[Mapping[str, torch.Tensor]], AbstractContextManager[None]]
"""Shows full values, by canonical name, in rank 0's modules; see `ParameterVisibility.lent`."""


class FullValues:
    """All parameters, full, from the masters, in the given dtypes, on the device; each is given once. Collective.

    What is sharded is gathered at once. What a rank has alone is copied bucket by bucket, as it is asked for, and the
    bucket's own memory is freed then, unless some code still views it. So one bucket at a time is there twice.
    """

    def __init__(self, runtime: Runtime, dtypes: Mapping[str, torch.dtype]) -> None:
        self._runtime, self._dtypes = runtime, dtypes
        self._made: dict[str, torch.Tensor] = {}
        """what has not been given yet"""
        for bucket in runtime.buckets.values():
            if bucket.layout.world > 1:
                self._make(bucket, _gather(runtime, bucket, bucket.values()))

    @property
    def missing(self) -> int:
        """Bytes that the values still take, besides the memory that is freed for them."""
        alone = [bucket for bucket in self._runtime.buckets.values() if bucket.layout.world == 1]
        freed = sum(tensor.nbytes for bucket in alone for tensor in _freed(bucket))
        slots = [slot for bucket in alone for slot in bucket.layout.slots]
        return max(0, sum(slot.numel * self._dtypes[slot.name].itemsize for slot in slots) - freed)

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            bucket = self._runtime.buckets[self._runtime.directory.slots[name][0]]
            self._make(bucket, bucket.values())
            if freed := _freed(bucket):
                bucket.renew()  # a backward of an earlier forward finds that its values are gone
            for tensor in freed:
                tensor.untyped_storage().resize_(0)
        return self._made.pop(name)

    @torch.no_grad()
    def _make(self, bucket: Bucket, full: torch.Tensor) -> None:
        for slot, view in zip(bucket.layout.slots, bucket.views(full), strict=True):
            self._made[slot.name] = cast_(torch.empty_like(view, dtype=self._dtypes[slot.name]), view)


def _freed(bucket: Bucket) -> list[torch.Tensor]:
    """The memory on the device that holds the values of a bucket, if no code views it.

    Not a master as one tensor, which an optimizer's hooks may have kept, nor pinned memory, nor what NumPy shares.
    """
    home, on_host = bucket.home, bucket.home.hosts or bucket.home.source_on_host
    if bucket.may_be_read(0) or (on_host and bucket.device.type == "cpu"):
        return []
    held = {id(tensor): tensor for tensor in (home.source, *home.at_rest) if tensor.device == bucket.device}
    if bucket.layout.trainable:
        held.pop(id(home.master), None)
    return [tensor for tensor in held.values() if tensor.untyped_storage().resizable()]


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


def persistent_buffers(model: nn.Module, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that state dicts have, by name; those of a module that has several names under the first, or each."""
    for prefix, module in model.named_modules(remove_duplicate=not every_name):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


@contextmanager
def _buffers_on_host(model: nn.Module) -> Iterator[None]:
    """Inside, the modules have copies of their buffers, in host memory."""
    held = [(module._buffers, dict(module._buffers)) for module in model.modules() if isinstance(module._buffers, dict)]
    buffers = {id(b): b for _, before in held for b in before.values() if b is not None}
    copies = {key: buffer.detach().to("cpu", copy=True) for key, buffer in buffers.items()}
    try:
        for entries, before in held:
            entries.update({name: copies[id(b)] for name, b in before.items() if b is not None})
        yield
    finally:
        for entries, before in held:
            entries.update(before)


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with state of their own making (`get_extra_state`), by the name that they have in state dicts."""
    named = model.named_modules()
    has = {name: m for name, m in named if type(m).get_extra_state is not nn.Module.get_extra_state}
    return {f"{name}._extra_state" if name else "_extra_state": module for name, module in has.items()}


def changing(context: EngineContext, loading: bool = False) -> list[str]:
    """The names of the modules that change what state dicts have, see `shapes_state_dict`."""
    own = {handle.id for handle in context.module_parameters.hooks}
    named = context.model.named_modules()
    return [name or "the model" for name, module in named if shapes_state_dict(module, own, loading)]


def of_modules(context: EngineContext, values: Mapping[str, torch.Tensor], lent: Lent) -> dict[str, Any]:
    """Rank 0's state dict, as its modules make it of `values`, which `stream` has yielded. In host memory.

    Experts that not all ranks share follow the others, under the names of each.
    """
    grouped = _grouped(context)
    named = context.model.named_parameters(remove_duplicate=False)
    foreign = tuple(f"{name}." for name, p in named if is_foreign(p))  # and what their modules add under these names
    with lent(own(context, values)), _buffers_on_host(context.model):
        found: dict[str, Any] = context.model.state_dict()
    for key, value in [*found.items()]:
        if key in grouped or f"{key}.".startswith(foreign):
            del found[key]
        elif isinstance(value, torch.Tensor):
            found[key] = value.cpu()
    found.update((key, values[key]) for keys in grouped.values() for key in keys)
    return found


def own(context: EngineContext, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of rank 0's `values`, by key of state dicts: its parameters', by canonical name."""
    return {slot.name: values[layout.keys(slot.name)[0]] for layout, slot in _slots(context)}


def _slots(context: EngineContext) -> list[tuple[BucketLayout, Slot]]:
    return [(b.layout, slot) for b in context.runtime.buckets.values() for slot in b.layout.slots]


def _grouped(context: EngineContext) -> dict[str, tuple[str, ...]]:
    """By each name of the experts that not all ranks share: their keys in state dicts."""
    names, several = _all_names(context), [(layout, slot) for layout, slot in _slots(context) if layout.groups > 1]
    return {name: layout.keys(name) for layout, slot in several for name in names[slot.name]}


def stream(context: EngineContext) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Full parameters (tied ones under each name) and persistent buffers on the CPU of rank 0; nothing elsewhere.

    One bucket is gathered at a time; where each of several groups has its own, each group's in turn. A rank that
    leaves early still takes part in the other gathers.
    """
    names = _all_names(context)
    wanted = context.control.rank == 0
    for bucket in context.runtime.buckets.values():
        for number, flat in enumerate(_each_group(context.runtime, bucket)):
            views = bucket.views(flat)
            for slot, view in zip(bucket.layout.slots, views, strict=True) if wanted else ():
                value = cast(view, context.original_dtypes[slot.name]).to("cpu", copy=True)
                try:
                    for name in names[slot.name]:
                        yield bucket.layout.keys(name)[number], value
                except GeneratorExit:
                    wanted = False
                    break
            del views, flat
    if wanted:
        for name, buffer in persistent_buffers(context.model, every_name=True):
            yield name, buffer.detach().to("cpu", copy=True)


def listed(context: EngineContext) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of all that `stream` yields, in its order. Local."""
    for key, _, slot in keys(context):
        yield key, slot.shape, context.original_dtypes[slot.name]
    for name, buffer in persistent_buffers(context.model, every_name=True):
        yield name, tuple(buffer.shape), buffer.dtype


def keys(context: EngineContext) -> Iterator[tuple[str, str, Slot]]:
    """Each key of a parameter in state dicts, that of its canonical name, and its slot; as `stream` has them. Local."""
    names = _all_names(context)
    for bucket in context.runtime.buckets.values():
        for number in range(bucket.layout.groups):
            for slot in bucket.layout.slots:
                for name in names[slot.name]:
                    yield bucket.layout.keys(name)[number], bucket.layout.keys(slot.name)[number], slot


def _all_names(context: EngineContext) -> dict[str, tuple[str, ...]]:
    """Canonical name -> all names of the parameter, that one first. ParameterError where others have come."""
    context.module_parameters.check()
    return context.module_parameters.all_names


def _by_modules(given: Mapping[str, Any], context: EngineContext, lent: Lent) -> dict[str, Any]:
    """What rank 0's modules load of a state dict, under the names of `stream`, and what they do not know.

    Extra state is there by name alone: the modules have it then. What they raise comes as ParameterError.
    """
    grouped, buckets = _grouped(context), context.runtime.buckets
    separate = {key: given[key] for keys in grouped.values() for key in keys if key in given}
    slots = [(slot, buckets[layout.id].shard.dtype) for layout, slot in _slots(context)]
    full = {slot.name: torch.empty(slot.shape, dtype=dtype, device="cpu") for slot, dtype in slots}
    with lent(full), _buffers_on_host(context.model):
        try:
            mine = {key: given[key] for key in given if key not in separate} if separate else given
            told = context.model.load_state_dict(mine, strict=False)
        except Exception as error:  # of any kind: the other ranks wait to be told
            raise ParameterError(f"[ZW208] {type(error).__name__}: {error}") from error
        found = full | dict(persistent_buffers(context.model)) | extra_states(context.model)
    for key in (*told.missing_keys, *grouped):
        found.pop(key, None)
    return found | separate | dict.fromkeys(told.unexpected_keys)


@torch.no_grad()
def load_state_dict(given: Mapping[str, Any], context: EngineContext, lent: Lent) -> None:
    """Rank 0's full values into every rank's shards, masters and buffers, and its extra state. All or nothing."""
    runtime, buffers = context.runtime, dict(persistent_buffers(context.model))
    shapes = {key: slot.shape for layout, slot in _slots(context) for key in layout.keys(slot.name)}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    extra = extra_states(context.model)
    known = {key for key, _, _ in keys(context)} | dict(persistent_buffers(context.model, every_name=True)).keys()
    problems, before = "", dict[str, Any]()
    if context.control.rank == 0:
        if changing(context, loading=True):
            before = {name: copy.deepcopy(module.get_extra_state()) for name, module in extra.items()}
            try:
                given = _by_modules(given, context, lent)
            except ParameterError as error:
                problems = str(error)
        present = set(given)  # asking `given` itself might read a tensor each time
        missing = sorted((shapes.keys() | extra.keys()) - present)
        unknown = sorted(present - known - extra.keys())
        wrong = [
            f"{name}: {list(found)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in present and (found := tuple(given[name].shape)) != shape
        ]
        parts_of = {"missing": missing, "unknown": unknown, "of another shape": wrong}
        problems = problems or "; ".join(f"{what}: {', '.join(which)}" for what, which in parts_of.items() if which)
    problems = context.control.broadcast_object(problems, label="load_state_dict")
    if problems:
        for name, state in before.items():
            extra[name].set_extra_state(state)
        raise ParameterError(f"[ZW208] the state dict does not fit the model, nothing was loaded: {problems}")
    for bucket in runtime.buckets.values():
        full = torch.zeros(bucket.layout.numel, dtype=bucket.shard.dtype, device=bucket.device)
        for number in range(bucket.layout.groups):
            if context.control.rank == 0:
                for view, slot in zip(bucket.views(full), bucket.layout.slots, strict=True):
                    view.copy_(given[bucket.layout.keys(slot.name)[number]])
            runtime.transport.broadcast(full)
            if number == bucket.number:
                bucket.put(bucket.slice(full).clone())
        bucket.renew()
    for name, buffer in buffers.items():
        if context.control.rank == 0:
            buffer.copy_(given[name])
        share(buffer, runtime)
    if extra:
        told = io.BytesIO()
        if context.control.rank == 0:
            torch.save({name: module.get_extra_state() for name, module in extra.items()}, told)
        told = io.BytesIO(context.control.broadcast_object(told.getvalue(), label="extra state"))
        if context.control.rank:
            for name, state in torch.load(told, map_location="cpu", weights_only=False).items():  # of this very program
                extra[name].set_extra_state(state)


def share(buffer: torch.Tensor, runtime: Runtime) -> None:
    """Rank 0's values of a buffer on all ranks."""
    plain = buffer.contiguous()
    runtime.transport.broadcast(plain.view(-1).view(torch.uint8))  # as bytes: gloo dies on dtypes that it does not know
    if plain is not buffer:
        buffer.copy_(plain)


def names_of(context: EngineContext) -> dict[int, str]:
    """The canonical name of each of the user's parameters, by `id`."""
    return {id(parameter): name for name, parameter in context.module_parameters.names.items()}
