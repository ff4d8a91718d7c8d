"""What an engine takes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroweave.checkpoint.compatibility import Compatibility, Wanted, quoted
from zeroweave.checkpoint.reader import Reader
from zeroweave.engine.context import EngineContext
from zeroweave.engine.state_dict import extra_states, names_of, persistent_buffers
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.optim.options import set_options
from zeroweave.optim.several import kind_of
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.bucket import Bucket


class Loaded:
    """Puts a checkpoint, by the names of this package, into one engine."""

    def __init__(self, parts: EngineContext, window: Window, step: OptimizerStep) -> None:
        self._parts, self._runtime, self._control = parts, parts.runtime, parts.control
        self._window, self._step = window, step

    def wanted(self) -> Wanted:
        """What the engine has for a checkpoint to fit."""
        buckets = self._runtime.buckets.values()
        held = [(key, slot, b) for b in buckets for slot in b.layout.slots for key in b.layout.keys(slot.name)]
        parameters = {key: slot.shape for key, slot, _ in held}
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self._parts.model)}
        optimizer, scheduler = self._parts.optimizer, self._step.lr_scheduler
        extra = extra_states(self._parts.model).keys()
        if optimizer is None:
            return Wanted(parameters, buffers, extra=extra)
        names = names_of(self._parts)
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.optimizer.param_groups]
        kind = None if scheduler is None else kind_of(scheduler)
        told = kind_of(optimizer.optimizer), groups
        refused = optimizer.offload.refused_in
        dtypes = {f"param/{key}": bucket.dtype for key, _, bucket in held}

        def clashes(state: Mapping[Any, Any]) -> list[str]:
            own = getattr(type(scheduler), "load_state_dict", None)
            if own is None or own.__module__ != "torch.optim.lr_scheduler":
                return []  # the program's own scheduler may take any state
            return [repr(key) for key, value in state.items() if _clashes(scheduler, key, value)]

        return Wanted(parameters, buffers, told, kind, extra, refused, dtypes, clashes)

    def load_extra(self, compatibility: Compatibility) -> None:
        """Hands the modules their extra state, which they may refuse."""
        modules = extra_states(self._parts.model)
        for name, state in compatibility.extra(self._control.rank).items():
            if name in modules:
                modules[name].set_extra_state(state)

    @torch.no_grad()
    def load(self, reader: Reader, compatibility: Compatibility) -> None:
        """Takes what fits: see `Compatibility.check`."""
        facts, optimizer, scheduler = compatibility.facts, self._parts.optimizer, self._step.lr_scheduler
        saved = facts.optimizer
        for bucket in self._runtime.buckets.values():
            self._load_parameters(bucket, reader)
            if bucket.layout.trainable and optimizer is not None and saved is not None:
                optimizer.replace(bucket.id, self._states(bucket, reader, compatibility, optimizer))
        self._load_buffers(reader, compatibility)
        if optimizer is not None and saved is not None:
            for group, mine in zip(saved.groups, optimizer.optimizer.param_groups, strict=True):
                set_options(mine, group.options)
        if scheduler is not None and facts.lr_scheduler is not None:
            scheduler.load_state_dict(facts.lr_scheduler.state)
        self._parts.progress.resume(reader.manifest.step)
        self._window.resume(facts.run.micro_steps)
        self._step.resume(facts.run.skipped_steps, facts.loss_scale.model_dump())

    def _load_parameters(self, bucket: Bucket, reader: Reader) -> None:
        layout, shard = bucket.layout, bucket.values().to("cpu", copy=True)
        for index, slot in enumerate(layout.slots):
            name = f"param/{layout.keys(slot.name)[bucket.number]}"
            place = layout.fragment(index, bucket.rank)
            if place.numel and name in reader.manifest.tensors:
                bucket.fragment(shard, index).copy_(reader.read(name, place.offset, place.numel))
        bucket.put(shard.to(bucket.device))
        bucket.renew()

    def _states(
        self, bucket: Bucket, reader: Reader, compatibility: Compatibility, optimizer: ShardedOptimizer
    ) -> dict[int, dict[str, Any]]:
        """By slot: what the optimizer is to hold of this rank's fragments of a bucket that the checkpoint has."""
        layout, home = bucket.layout, optimizer.home_of_moments(bucket.id)
        states: dict[int, dict[str, Any]] = {}
        shards: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        for index, slot in enumerate(layout.slots):
            place, name = layout.fragment(index, bucket.rank), layout.keys(slot.name)[bucket.number]
            if not place.numel or f"param/{name}" not in reader.manifest.tensors:
                continue
            state = states[index] = {}
            for key in compatibility.cut.get(name, ()):
                read = reader.read(f"state/{name}/{quoted(key)}", place.offset, place.numel)
                if (key, read.dtype) not in shards:
                    shards[key, read.dtype] = torch.zeros(layout.shard_numel, dtype=read.dtype, device=home)
                state[key] = bucket.fragment(shards[key, read.dtype], index).copy_(read)
            for key, value in compatibility.scalars.get(name, {}).items():
                at = optimizer.home_of_scalars(bucket.id, index, key)
                state[key] = value.to(at, copy=True) if isinstance(value, torch.Tensor) else value
        return states

    def _load_buffers(self, reader: Reader, compatibility: Compatibility) -> None:
        for name, buffer in persistent_buffers(self._parts.model):
            saved = compatibility.buffer(name, self._control.rank)
            if saved in reader.manifest.tensors:
                buffer.copy_(reader.whole(saved))


def _clashes(scheduler: Any, key: Any, value: Any) -> bool:
    """True if a value would take the place of a method, or of the number of steps without being one."""
    if not isinstance(key, str) or callable(getattr(type(scheduler), key, None)):
        return True
    return key in ("last_epoch", "_step_count") and not isinstance(value, int | float | torch.Tensor)
