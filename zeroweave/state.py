"""Full values out of shards, and back: gathers, writes that are kept, state dicts.

Everything here is collective and works between a forward and a backward as well as between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from zeroweave.comm.control import Control
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.skip import Skipping
from zeroweave.comm.timed import Timed
from zeroweave.config import Config
from zeroweave.eager.access import Shown
from zeroweave.eager.hooks import delivery
from zeroweave.errors import ParameterError
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.rest import Places
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.stub import Status
from zeroweave.schedule import Facts


@dataclass(frozen=True)
class Parts:
    """What an engine is assembled from; see `initialize`."""

    model: nn.Module
    config: Config
    runtime: Runtime
    ledger: Ledger
    transport: Skipping
    """the runtime's"""
    timed: Timed
    """what it hands on to"""
    control: Control
    places: Places
    status: Status
    optimizer: ShardedOptimizer | None
    original_dtypes: Mapping[str, torch.dtype]
    facts: Facts
    device: torch.device
    owns_process_group: bool


class Opened:
    """Everything gathered and readable for the user, between `open` and `close`. Neither minds a second call."""

    def __init__(self, runtime: Runtime, shown: Shown, status: Status) -> None:
        self._runtime, self._shown, self._status = runtime, shown, status
        self.is_open = False

    def open(self) -> None:
        if self.is_open:
            return
        for bucket in self._runtime.buckets.values():
            bucket.unshard()
        for bucket in self._runtime.buckets.values():
            bucket.wait()
        self._shown.open(delivery(self._runtime))
        self._status.full = self.is_open = True

    def close(self) -> None:
        if not self.is_open:
            return
        self._status.full = self.is_open = False
        self._shown.close()
        with ExitStack() as each:  # a parameter that was written raises, but the others go as well
            for bucket in self._runtime.buckets.values():
                each.callback(self._runtime.replay.release, bucket)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside nothing is open; at the end, unless that is an exception, what was is open again. Collective."""
        was_open = self.is_open
        self.close()
        yield
        if was_open:
            self.open()


@torch.no_grad()
def store(runtime: Runtime) -> None:
    """Keeps what was written into gathered parameters: this rank's part goes into the shard.

    A shard that is a master keeps its own, finer value wherever the parameter still has the one rounded from it.
    """
    for bucket in runtime.buckets.values():
        written = bucket.slice(bucket.flat)
        changed = written != bucket.shard.to(bucket.dtype)
        bucket.shard.copy_(torch.where(changed, written.to(bucket.shard.dtype), bucket.shard))
        if bucket.written:
            bucket.renew()


@torch.no_grad()
def full_values(runtime: Runtime, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """All parameters, full, from the masters, in the given dtypes, on the device."""
    return {
        slot.name: view.to(dtypes[slot.name], copy=True)
        for bucket in runtime.buckets.values()
        for slot, view in zip(bucket.layout.slots, _gather_like(runtime, bucket, bucket.shard), strict=True)
    }


def _gather_like(runtime: Runtime, bucket: Bucket, shard: torch.Tensor) -> list[torch.Tensor]:
    """Views of the full values of a tensor that is sharded like the bucket, by slot."""
    full = torch.empty(bucket.layout.numel, dtype=shard.dtype, device=shard.device)
    runtime.transport.all_gather(full, shard, bucket.layout).wait()
    return bucket.views(full)


@torch.no_grad()
def full_gradients(runtime: Runtime, control: Control) -> dict[str, torch.Tensor | None]:
    """The window's reduced gradients, full, float32, on the CPU; None where no rank had one."""
    gradients = runtime.gradients
    gradients.reductions.settle_all()
    ranks = control.all_gather_bytes(gradients.had_gradient(), "which gradients exist")
    absent = gradients.absent(bytes(any(flags) for flags in zip(*ranks, strict=True)))
    result: dict[str, torch.Tensor | None] = {}
    for bucket_id, missing in absent.items():
        bucket = runtime.buckets[bucket_id]
        shard = gradients.shard(bucket_id)
        views = None if shard is None else _gather_like(runtime, bucket, shard.float())
        for index, slot in enumerate(bucket.layout.slots):
            result[slot.name] = None if views is None or index in missing else views[index].cpu().clone()
    return result


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


@torch.no_grad()
def state_dict(model: nn.Module, runtime: Runtime, parts: Parts) -> dict[str, torch.Tensor]:
    """Full parameters (tied ones under each name) and persistent buffers on the CPU of rank 0; {} elsewhere."""
    first = parts.control.rank == 0
    values: dict[str, torch.Tensor] = {}
    for bucket in runtime.buckets.values():
        views = _gather_like(runtime, bucket, bucket.shard)
        if first:
            for slot, view in zip(bucket.layout.slots, views, strict=True):
                values[slot.name] = view.to("cpu", parts.original_dtypes[slot.name], copy=True)
    if not first:
        return {}
    of = {id(p): name for name, p in model.named_parameters()}
    everything = {name: values[of[id(p)]] for name, p in model.named_parameters(remove_duplicate=False)}
    everything.update((name, buffer.detach().to("cpu", copy=True)) for name, buffer in _persistent_buffers(model))
    return everything


@torch.no_grad()
def load_state_dict(given: Mapping[str, torch.Tensor], model: nn.Module, runtime: Runtime, parts: Parts) -> None:
    """Rank 0's full values into every rank's shards, masters and buffers. All or nothing."""
    buffers = dict(_persistent_buffers(model))
    names = {slot.name: slot.shape for b in runtime.buckets.values() for slot in b.layout.slots}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    problems = None
    if parts.control.rank == 0:
        missing = sorted((names.keys() | buffers.keys()) - given.keys())
        unknown = sorted(given.keys() - aliases - buffers.keys())
        shapes = {**names, **{name: tuple(b.shape) for name, b in buffers.items()}}
        wrong = [
            f"{name}: {list(given[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in given and tuple(given[name].shape) != tuple(shape)
        ]
        parts_of = {"missing": missing, "unknown": unknown, "of another shape": wrong}
        problems = "; ".join(f"{what}: {', '.join(which)}" for what, which in parts_of.items() if which)
    problems = parts.control.broadcast_object(problems, label="load_state_dict")
    if problems:
        raise ParameterError(f"the state dict does not fit the model, nothing was loaded: {problems}")
    for bucket in runtime.buckets.values():
        full = torch.zeros(bucket.layout.numel, dtype=bucket.shard.dtype, device=bucket.shard.device)
        if parts.control.rank == 0:
            for view, slot in zip(bucket.views(full), bucket.layout.slots, strict=True):
                view.copy_(given[slot.name])
        runtime.transport.broadcast(full)
        bucket.shard.copy_(bucket.slice(full))
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
