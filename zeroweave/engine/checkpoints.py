"""What a run consists of, into a checkpoint and out of it.

Tensors, by name (NAME: a parameter's key in state dicts; R: a rank):

    param/NAME           the parameter, the float32 master where there is one
    state/NAME/KEY       what the optimizer keeps of each element, such as "exp_avg"
    buffer/NAME          a persistent buffer of rank 0, and of all ranks that have no other
    rank/R/buffer/NAME   that of rank R, where it is another

Values, by name: "run", "optimizer", "lr_scheduler", "loss_scale", "client"; "scalar/NAME/KEY", what the optimizer keeps
of a parameter as a whole, such as "step"; "rank/R/random", the states of random numbers; "data", the position of rank
0's loader, and "rank/R/data", that of another rank where it is another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import xxhash

from zeroweave.checkpoint import plain, random_numbers
from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import Part, bytes_of
from zeroweave.checkpoint.fitting import Fitting, Wanted
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.reader import Reader, opened
from zeroweave.checkpoint.writer import Content, save, words
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.state_dict import listed, persistent_buffers, stream
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.values import Values
from zeroweave.engine.window import Window
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.optim.states import States
from zeroweave.runtime.bucket import Bucket

StrPath: TypeAlias = str | os.PathLike[str]
Plain: TypeAlias = Mapping[str, Any]
"""Values that `plain.encode` takes, by name."""

_OWN_OPTIONS: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Of an optimizer's groups: what they are of, and how they compute, which is this run's own affair."""


class Checkpoints:
    """Saves one engine and loads into it. The public methods are those of `Engine`, which tells more of them."""

    def __init__(self, parts: EngineParts, window: Window, step: OptimizerStep, values: Values) -> None:
        self._parts, self._runtime, self._control = parts, parts.runtime, parts.control
        self._window, self._step, self._values = window, step, values

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Guards a call that all ranks make, between two windows."""
        with self._parts.guard(call):
            self._refuse(f"{call}()")
            self._parts.guard.meet()
            yield

    def save(self, path: StrPath, tag: str | None, client_state: Plain | None, data: Any) -> str:
        with self.alone("save"):
            step = self._parts.progress.step
            tag = self._control.broadcast_object(tag, label="the tag of a checkpoint") or f"step-{step:08d}"
            keeping, stage = self._parts.config.checkpoint, self._parts.config.stage
            keep = None if keeping.keep_last is None else (keeping.keep_last, keeping.keep_every)
            content = partial(self._content, self._own_buffers(), self._data(data), client_state or {})
            save(Folder(path), tag, step, stage, content, self._control, keep)
            return tag

    def load(self, path: StrPath, tag: str | None, strict: bool, data: Any) -> dict[str, Any]:
        with self.alone("load"):
            with opened(Folder(path), tag, self._control) as reader:
                fitting = Fitting(reader.manifest, self._wanted(), strict)
                fitting.check()
                client: dict[str, Any] = plain.decode(reader.manifest.values["client"])
                if data is not None:  # first: it may refuse, and then nothing has changed
                    data.load_state_dict(fitting.data(self._control.rank, self._control.world))
                with self._values.rewriting("load()"):
                    self._load(reader, fitting)
            return client

    def export(self, path: StrPath, dtype: torch.dtype | None, shard_bytes: int) -> None:
        with self.alone("export"):
            failure, items = "", stream(self._parts)
            if self._control.rank == 0:
                parts = [
                    Part(name, shape, _cast(kind, dtype), 0, prod(shape)) for name, shape, kind in listed(self._parts)
                ]
                tensors = (value.to(_cast(value.dtype, dtype)) for _, value in items)
                try:
                    export(Path(path), parts, tensors, shard_bytes, self._save_config)
                except (OSError, CheckpointError) as error:
                    failure = words(error)
                items.close()  # takes part in what gathers are left
            for _ in items:
                pass
            if failure := self._control.broadcast_object(failure, label="the end of an export"):
                raise CheckpointError(f"{path} was not exported: {failure}")

    def _save_config(self, folder: Path) -> None:
        """Models of transformers have a config, which `from_pretrained` reads."""
        for config in (getattr(self._parts.model, name, None) for name in ("config", "generation_config")):
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)

    def _refuse(self, what: str) -> None:
        self._window.refuse_inside(what)
        self._window.refuse_coalescing(what)
        self._window.refuse_computing(what, "call it between them")
        if self._parts.stubs.gradients_pending:
            raise EngineError(f"{what} while gradients wait: call it after step() or zero_grad()")

    # ------------------------------------------------------------------ out of the engine
    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Rank 0's, by name, and those of this rank that differ from them. Collective."""
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._parts.model)}
        digests = {name: _digest(buffer) for name, buffer in buffers.items()}
        first = self._control.broadcast_object(digests, label="the buffers")
        if (rank := self._control.rank) == 0:
            return {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        return {f"rank/{rank}/buffer/{name}": b for name, b in buffers.items() if first.get(name) != digests[name]}

    def _data(self, data: Any) -> dict[str, Any]:
        """The position of a loader: rank 0's, and that of this rank where it is another one. Collective."""
        if data is None:
            return {}
        mine = plain.encode(data.state_dict(), "data.state_dict()")
        first = self._control.broadcast_object(mine, label="the data")
        if (rank := self._control.rank) == 0:
            return {"data": mine}
        return {} if mine == first else {f"rank/{rank}/data": mine}

    def _content(
        self, buffers: Mapping[str, torch.Tensor], data: Mapping[str, Any], client: Mapping[str, Any]
    ) -> Content:
        """What this rank has to write."""
        self._runtime.transfers.finish()
        rank, buckets = self._control.rank, self._runtime.buckets.values()
        parts = [part for bucket in buckets for part, _ in self._pieces(bucket)]
        parts += [Part.of(name, value) for name, value in buffers.items()]
        values = {f"rank/{rank}/random": plain.encode(random_numbers.states(self._parts.device), "random"), **data}
        values |= {name: value for bucket in buckets for name, value in self._scalars(bucket)}
        if rank == 0:
            values |= self._facts(client)
        return Content(parts, self._tensors(buffers), values)

    def _tensors(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What is written, in host memory, in the order of the parts."""
        for bucket in self._runtime.buckets.values():
            for part, value in self._pieces(bucket):
                if part.numel:
                    yield value.cpu()
        for value in buffers.values():
            if value.numel():
                yield value.cpu()

    def _pieces(self, bucket: Bucket) -> Iterator[tuple[Part, torch.Tensor]]:
        """What this rank has of a bucket's parameters, and of what the optimizer keeps of their elements."""
        layout = bucket.layout
        for index, slot in enumerate(layout.slots):
            place, name = layout.fragment(index, bucket.rank), layout.keys(slot.name)[bucket.number]
            if not place.numel and (slot.numel or bucket.rank):
                continue  # of a parameter without elements the first rank of its group tells
            mine = bucket.fragment(bucket.shard, index)
            yield Part(f"param/{name}", slot.shape, mine.dtype, place.offset, place.numel), mine
            for key, value in self._state(bucket, index).items():
                if _is_cut(value, place.numel):
                    yield Part(f"state/{name}/{key}", slot.shape, value.dtype, place.offset, place.numel), value

    def _scalars(self, bucket: Bucket) -> Iterator[tuple[str, Any]]:
        """What the optimizer keeps of whole parameters, encoded: told by the first rank that has something of one."""
        layout = bucket.layout
        for index, slot in enumerate(layout.slots):
            sizes = [layout.fragment(index, place).numel for place in range(bucket.rank + 1)]
            if not sizes[-1] or any(sizes[:-1]):
                continue
            for key, value in self._state(bucket, index).items():
                if not _is_cut(value, sizes[-1]):
                    name = f"{layout.keys(slot.name)[bucket.number]}/{key}"
                    yield f"scalar/{name}", plain.encode(value, f"the optimizer's state {name}")

    def _state(self, bucket: Bucket, slot: int) -> Mapping[str, Any]:
        if self._parts.optimizer is None or not bucket.layout.trainable:
            return {}
        return self._parts.optimizer.state_of(bucket.id, slot)

    def _facts(self, client: Mapping[str, Any]) -> dict[str, Any]:
        """What all ranks share."""
        optimizer, scheduler = self._parts.optimizer, self._step.lr_scheduler
        facts: dict[str, Any] = {
            "run": {"micro_steps": self._window.micro_steps, "skipped_steps": self._step.skipped},
            "client": plain.encode(dict(client), "client_state"),
            "loss_scale": plain.encode(self._step.scale_state(), "the loss scale"),
        }
        if optimizer is not None:
            users = optimizer.optimizer
            facts["optimizer"] = {"class": type(users).__name__, "groups": self._groups(users)}
        if scheduler is not None:
            facts["lr_scheduler"] = plain.encode(scheduler.state_dict(), "lr_scheduler.state_dict()")
        return facts

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        names = names_of(self._parts)
        return [
            {
                "params": [names[id(parameter)] for parameter in group["params"]],
                "options": {
                    key: plain.encode(value, f"param_groups[{index}][{key!r}]")
                    for key, value in group.items()
                    if key not in _OWN_OPTIONS
                },
            }
            for index, group in enumerate(optimizer.param_groups)
        ]

    # ------------------------------------------------------------------ into the engine
    def _wanted(self) -> Wanted:
        slots = [(b.layout, slot) for b in self._runtime.buckets.values() for slot in b.layout.slots]
        parameters = {key: slot.shape for layout, slot in slots for key in layout.keys(slot.name)}
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self._parts.model)}
        if (mine := self._parts.optimizer) is None:
            return Wanted(parameters, buffers, None)
        groups = [group["params"] for group in self._groups(mine.optimizer)]
        return Wanted(parameters, buffers, (type(mine.optimizer).__name__, groups))

    @torch.no_grad()
    def _load(self, reader: Reader, fitting: Fitting) -> None:
        states: States = {}
        for bucket in self._runtime.buckets.values():
            self._load_parameters(bucket, reader)
            if bucket.layout.trainable and self._parts.optimizer is not None:
                self._load_states(bucket, reader, fitting, states)
        self._load_buffers(reader)
        values, rank = reader.manifest.values, self._control.rank
        if (optimizer := self._parts.optimizer) is not None and fitting.has_optimizer:
            optimizer.replace(states)
            for group, saved in zip(optimizer.optimizer.param_groups, values["optimizer"]["groups"], strict=True):
                _set_options(group, saved["options"])
        if self._step.lr_scheduler is not None and "lr_scheduler" in values:
            self._step.lr_scheduler.load_state_dict(plain.decode(values["lr_scheduler"]))
        run = values["run"]
        self._parts.progress.resume(reader.manifest.step)
        self._window.resume(run["micro_steps"])
        self._step.resume(run["skipped_steps"], plain.decode(values["loss_scale"]))
        if f"rank/{rank}/random" in values:
            random_numbers.restore(plain.decode(values[f"rank/{rank}/random"]), self._parts.device)

    def _load_parameters(self, bucket: Bucket, reader: Reader) -> None:
        layout, shard = bucket.layout, bucket.values().to("cpu", copy=True)
        for index, slot in enumerate(layout.slots):
            name = f"param/{layout.keys(slot.name)[bucket.number]}"
            place = layout.fragment(index, bucket.rank)
            if place.numel and name in reader.manifest.tensors:
                bucket.fragment(shard, index).copy_(reader.read(name, place.offset, place.numel))
        bucket.put(shard.to(bucket.device))
        bucket.renew()

    def _load_states(self, bucket: Bucket, reader: Reader, fitting: Fitting, states: States) -> None:
        """Adds what the optimizer is to hold of this rank's fragments of a bucket."""
        optimizer, layout = self._parts.optimizer, bucket.layout
        assert optimizer is not None
        home = optimizer.home_of_moments(bucket.id)
        shards: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        for index, slot in enumerate(layout.slots):
            place, name = layout.fragment(index, bucket.rank), layout.keys(slot.name)[bucket.number]
            if not place.numel:
                continue
            scalars_at = optimizer.home_of_scalars(bucket.id, index)
            state: dict[str, Any] = {}
            for key in fitting.cut.get(name, ()):
                read = reader.read(f"state/{name}/{key}", place.offset, place.numel)
                if (key, read.dtype) not in shards:
                    shards[key, read.dtype] = torch.zeros(layout.shard_numel, dtype=read.dtype, device=home)
                state[key] = bucket.fragment(shards[key, read.dtype], index).copy_(read)
            for key, value in fitting.scalars.get(name, {}).items():
                scalar = plain.decode(value)
                state[key] = scalar.to(scalars_at) if isinstance(scalar, torch.Tensor) else scalar
            if state:
                states[bucket.id, index] = state

    def _load_buffers(self, reader: Reader) -> None:
        for name, buffer in persistent_buffers(self._parts.model):
            own = f"rank/{self._control.rank}/buffer/{name}"
            known = own if own in reader.manifest.tensors else f"buffer/{name}"
            if known in reader.manifest.tensors:
                buffer.copy_(reader.whole(known))


def names_of(parts: EngineParts) -> dict[int, str]:
    """The canonical name of each of the user's parameters, by `id`."""
    return {id(parameter): name for name, parameter in parts.places.names.items()}


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _is_cut(value: Any, numel: int) -> bool:
    """Does an optimizer keep `value` of each of the `numel` elements of a fragment?"""
    return isinstance(value, torch.Tensor) and value.shape == (numel,)


def _set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        option, now = plain.decode(value), group.get(key)
        if isinstance(now, torch.Tensor):
            now.copy_(torch.as_tensor(option))
        else:
            group[key] = option


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor.cpu().contiguous().reshape(-1)))
