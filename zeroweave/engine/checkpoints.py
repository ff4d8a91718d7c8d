"""What a run consists of, into a checkpoint and out of it.

Tensors, by name (NAME: a parameter's key in state dicts; R: a rank):

    param/NAME           the parameter, the float32 master where there is one
    state/NAME/KEY       what the optimizer keeps of each element, such as "exp_avg"
    buffer/NAME          a persistent buffer of rank 0, and of all ranks that have no other
    rank/R/buffer/NAME   that of rank R, where it is another

Values, by name: "run", "model", "optimizer", "lr_scheduler", "loss_scale", "client"; "scalar/NAME/KEY", what the
optimizer keeps of a parameter as a whole, such as "step"; "rank/R/random", the states of random numbers; "data", the
position of rank 0's loader, and "rank/R/data", that of another rank where it is another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final, TypeAlias

import torch

from zeroweave.checkpoint import plain, random_numbers
from zeroweave.checkpoint.export import CONFIGS, Model, cast, export
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.fitting import Fitting, Wanted
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.reader import Reader, opened
from zeroweave.checkpoint.writer import Content, save, words
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.state_dict import keys, listed, persistent_buffers, stream
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.values import Values
from zeroweave.engine.window import Window
from zeroweave.engine.written import digest
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.ranks.faults import Faults
from zeroweave.ranks.signals import Signals
from zeroweave.runtime.bucket import Bucket

StrPath: TypeAlias = str | os.PathLike[str]
Plain: TypeAlias = Mapping[str, Any]
"""Values that `plain.encode` takes, by name."""

_LOG: Final = logging.getLogger("zeroweave")
_OWN_OPTIONS: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Of an optimizer's groups: what they are of, and how they compute, which is this run's own affair."""


class Checkpoints:
    """Saves one engine and loads into it. The public methods are those of `Engine`, which tells more of them."""

    def __init__(
        self,
        parts: EngineParts,
        window: Window,
        step: OptimizerStep,
        values: Values,
        signals: Signals,
        faults: Faults,
    ) -> None:
        self._parts, self._runtime, self._control = parts, parts.runtime, parts.control
        self._window, self._step, self._values = window, step, values
        self._signals, self._faults = signals, faults
        self._client_state: Callable[[], Plain] = dict
        self._data: Any = None
        """both: what a checkpoint has that a signal asks for"""

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Guards a call that all ranks make, between two windows."""
        with self._parts.guard(call):
            self._refuse(f"{call}()")
            self._parts.guard.meet()
            yield

    def save(self, path: StrPath, tag: str | None, client_state: Plain | None, data: Any) -> str:
        client = dict(client_state or {})
        with self.alone("save"):
            step, folder = self._parts.progress.step, Folder(path)
            tag = folder.free(f"step-{step:08d}") if tag is None else tag
            tag = str(self._control.broadcast_object(tag, label="the tag of a checkpoint"))
            keeping, stage = self._parts.config.checkpoint, self._parts.config.stage
            keep = None if keeping.keep_last is None else (keeping.keep_last, keeping.keep_every)
            content = partial(self._content, self._own_buffers(), self._position(data), client)
            folder = self._faults.before(folder, "publish", "publish")
            save(folder, tag, step, stage, content, self._control, keep)
            return tag

    def on_signal(self, client_state: Callable[[], Plain] | None, data: Any) -> None:
        self._client_state, self._data = client_state or dict, data

    def step_ended(self) -> None:
        """Saves, and ends the job, where the ranks know of signals that ask for it. Collective."""
        folder, signals = self._parts.config.checkpoint.save_on_signal, self._signals.take()
        if not signals or folder is None:
            return
        tag, ends = self.save(folder, None, self._client_state(), self._data), SIGTERM in signals
        if self._control.rank == 0:
            names = " and ".join(sorted(number.name for number in signals))
            _LOG.warning("zeroweave: %s: saved as %s%s", names, Path(folder) / tag, "; the job ends" if ends else "")
        if ends:
            raise SystemExit(128 + SIGTERM)

    def load(self, path: StrPath, tag: str | None, strict: bool, data: Any, missing_ok: bool) -> dict[str, Any]:
        with self.alone("load"):
            folder = Folder(path)
            if missing_ok and self._control.broadcast_object(folder.empty, label="whether there is a checkpoint"):
                return {}
            with opened(folder, tag, self._control) as reader:
                fitting = Fitting(reader.manifest, self._wanted(), strict)
                fitting.check()
                if data is not None:  # first: it may refuse, and then nothing has changed
                    data.load_state_dict(fitting.data(self._control.rank, self._control.world))
                if (numbers := fitting.values.get(f"rank/{self._control.rank}/random")) is not None:
                    random_numbers.restore(numbers, self._parts.device)
                with self._values.rewriting("load()"):
                    self._load(reader, fitting)
            return fitting.facts.client

    def export(self, path: StrPath, dtype: torch.dtype | None, shard_bytes: int) -> None:
        with self.alone("export"):
            failure, items = "", stream(self._parts)
            cause: Exception | None = None
            if self._control.rank == 0:
                tensors = (value.to(cast(value.dtype, dtype)) for _, value in items)
                try:
                    all_of = [
                        Part(name, shape, cast(kind, dtype), 0, prod(shape))
                        for name, shape, kind in listed(self._parts)
                    ]
                    export(Path(path), all_of, tensors, shard_bytes, self._save_config)
                except (OSError, CheckpointError) as error:
                    failure, cause = words(error), error
            for _ in items:
                pass  # rank 0 takes part in what gathers are left, also where it has failed before the first
            if failure := self._control.broadcast_object(failure, label="the end of an export"):
                raise CheckpointError(f"{path} was not exported: {failure}") from cause

    def _save_config(self, folder: Path) -> None:
        """Models of transformers have a config, which `from_pretrained` reads."""
        for config in (getattr(self._parts.model, name, None) for name in CONFIGS):
            if config is not None and hasattr(config, "save_pretrained"):
                try:
                    config.save_pretrained(folder)
                except Exception as error:  # whatever it is, the other ranks wait to be told
                    raise CheckpointError(f"{type(config).__name__}.save_pretrained: {words(error)}") from error

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
        digests = {name: digest(buffer) for name, buffer in buffers.items()}
        first = self._control.broadcast_object(digests, label="the buffers")
        if (rank := self._control.rank) == 0:
            return {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        return {f"rank/{rank}/buffer/{name}": b for name, b in buffers.items() if first.get(name) != digests[name]}

    def _position(self, data: Any) -> dict[str, Any]:
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
        parts = [part for bucket in buckets for part, _ in self._pieces(bucket, bucket.shard)]
        parts += [Part.of(name, value) for name, value in buffers.items()]
        values = {f"rank/{rank}/random": plain.encode(random_numbers.states(self._parts.device), "random"), **data}
        values |= {name: value for bucket in buckets for name, value in self._scalars(bucket)}
        if rank == 0:
            values |= self._facts(client)
        return Content(parts, self._faults.amid(self._tensors(buffers), "write"), values)

    def _tensors(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What is written, in host memory, in the order of the parts."""
        for bucket in self._runtime.buckets.values():
            for part, value in self._pieces(bucket, bucket.shard.cpu()):
                if part.numel:
                    yield value.cpu()
        for value in buffers.values():
            if value.numel():
                yield value.cpu()

    def _pieces(self, bucket: Bucket, shard: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """What this rank has of a bucket's parameters, in its `shard`, and of what the optimizer keeps of them."""
        layout = bucket.layout
        for index, slot in enumerate(layout.slots):
            place, name = layout.fragment(index, bucket.rank), layout.keys(slot.name)[bucket.number]
            if not place.numel and (slot.numel or bucket.rank):
                continue  # of a parameter without elements the first rank of its group tells
            mine = bucket.fragment(shard, index)
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
        held = self._parts.optimizer.state_of(bucket.id, slot)
        if others := [key for key in held if type(key) is not str]:
            raise EngineError(f"the optimizer keeps its state under {others[0]!r}: a checkpoint needs a string there")
        return held

    def _facts(self, client: Mapping[str, Any]) -> dict[str, Any]:
        """What all ranks share."""
        optimizer, scheduler = self._parts.optimizer, self._step.lr_scheduler
        facts: dict[str, Any] = {
            "model": plain.encode(self._model().model_dump(), "model"),
            "run": {"micro_steps": self._window.micro_steps, "skipped_steps": self._step.skipped},
            "client": plain.encode(dict(client), "client_state"),
            "loss_scale": plain.encode(self._step.scale_state(), "the loss scale"),
        }
        if optimizer is not None:
            users = optimizer.optimizer
            facts["optimizer"] = {"kind": type(users).__name__, "groups": self._groups(users)}
        if scheduler is not None:
            state = plain.encode(scheduler.state_dict(), "lr_scheduler.state_dict()")
            facts["lr_scheduler"] = {"kind": type(scheduler).__name__, "state": state}
        return facts

    def _model(self) -> Model:
        """What an export without an engine needs beside the tensors."""
        dtypes, aliases = {}, {}
        for key, canonical, slot in keys(self._parts):
            dtypes[canonical] = NAMES[self._parts.original_dtypes[slot.name]]
            if key != canonical:
                aliases[key] = canonical
        configs: list[tuple[str, Any]] = [(name, getattr(self._parts.model, name, None)) for name in CONFIGS]
        texts = {name: config.to_json_string() for name, config in configs if hasattr(config, "to_json_string")}
        return Model(dtypes=dtypes, aliases=aliases, configs=texts)

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
        optimizer, scheduler = self._parts.optimizer, self._step.lr_scheduler
        if optimizer is None:
            return Wanted(parameters, buffers, None, None)
        names = names_of(self._parts)
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.optimizer.param_groups]
        kind = None if scheduler is None else type(scheduler).__name__
        return Wanted(parameters, buffers, (type(optimizer.optimizer).__name__, groups), kind)

    @torch.no_grad()
    def _load(self, reader: Reader, fitting: Fitting) -> None:
        facts, optimizer, scheduler = fitting.facts, self._parts.optimizer, self._step.lr_scheduler
        saved = facts.optimizer
        for bucket in self._runtime.buckets.values():
            self._load_parameters(bucket, reader)
            if bucket.layout.trainable and optimizer is not None and saved is not None:
                optimizer.replace(bucket.id, self._states(bucket, reader, fitting, optimizer))
        self._load_buffers(reader)
        if optimizer is not None and saved is not None:
            for group, mine in zip(saved.groups, optimizer.optimizer.param_groups, strict=True):
                _set_options(mine, group.options)
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
        self, bucket: Bucket, reader: Reader, fitting: Fitting, optimizer: ShardedOptimizer
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
            for key in fitting.cut.get(name, ()):
                read = reader.read(f"state/{name}/{key}", place.offset, place.numel)
                if (key, read.dtype) not in shards:
                    shards[key, read.dtype] = torch.zeros(layout.shard_numel, dtype=read.dtype, device=home)
                state[key] = bucket.fragment(shards[key, read.dtype], index).copy_(read)
            for key, value in fitting.scalars.get(name, {}).items():
                at = optimizer.home_of_scalars(bucket.id, index, key)
                state[key] = value.to(at, copy=True) if isinstance(value, torch.Tensor) else value
        return states

    def _load_buffers(self, reader: Reader) -> None:
        for name, buffer in persistent_buffers(self._parts.model):
            own = f"rank/{self._control.rank}/buffer/{name}"
            known = own if own in reader.manifest.tensors else f"buffer/{name}"
            if known in reader.manifest.tensors:
                buffer.copy_(reader.whole(known))


def names_of(parts: EngineParts) -> dict[int, str]:
    """The canonical name of each of the user's parameters, by `id`."""
    return {id(parameter): name for name, parameter in parts.places.names.items()}


def _is_cut(value: Any, numel: int) -> bool:
    """Does an optimizer keep `value` of each of the `numel` elements of a fragment?"""
    return isinstance(value, torch.Tensor) and value.shape == (numel,)


def _set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """An option that is a tensor, such as a learning rate that is captured, stays that tensor; no other becomes one."""
    for key, value in saved.items():
        now = group.get(key)
        if isinstance(now, torch.Tensor):
            now.copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and key in group else value
