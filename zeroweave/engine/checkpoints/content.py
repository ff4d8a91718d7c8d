"""What a run consists of, into a checkpoint and out of it.

Tensors, by name (NAME: a parameter's key in state dicts; R: a rank):

    param/NAME           the parameter, the float32 master where there is one
    state/NAME/KEY       what the optimizer keeps of each element, such as "exp_avg"; KEY: see `compatibility.quoted`
    buffer/NAME          a persistent buffer of rank 0, and of all ranks that have no other
    rank/R/buffer/NAME   that of rank R, where it is another
    client/N             the N-th tensor of what the program hands in that is too large for a value

Values, by name: "run", "model", "optimizer", "lr_scheduler", "loss_scale", "client"; "scalar/NAME/KEY", what the
optimizer keeps of a parameter as a whole, such as "step"; "rank/R/random", the states of random numbers; "data", the
position of rank 0's loader, and "rank/R/data", that of another rank where it is another; likewise "extra" and
"rank/R/extra", the extra state of modules by its names in state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import torch

from zeroweave.checkpoint import plain, random_numbers
from zeroweave.checkpoint.compatibility import Compatibility, Wanted, quoted
from zeroweave.checkpoint.export import CONFIGS, Model
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.reader import Reader
from zeroweave.checkpoint.writer import Content
from zeroweave.engine.context import EngineContext
from zeroweave.engine.state_dict import extra_states, keys, names_of, persistent_buffers
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.engine.write_check import digest
from zeroweave.errors import EngineError
from zeroweave.layout import Fragment
from zeroweave.notices import warn
from zeroweave.optim.multi_optimizer import kind_of
from zeroweave.optim.options import set_options
from zeroweave.optim.quantize8 import BLOCK, Coded, decode
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.ranks.faults import Faults
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.shard import whole
from zeroweave.runtime.transfers import Snapshot

_OWN_OPTIONS: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of an optimizer's groups that belong to this run alone: their parameters, and how they compute."""

_AT_ONCE: Final = 1 << 24
"""Elements that a thread reads in place, while an update waits for it."""

_Values = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class _Portion(NamedTuple):
    """Tensors at rest, and how to make one of values of them."""

    tensors: tuple[torch.Tensor, ...]
    values: _Values


class _Held(NamedTuple):
    """What the optimizer keeps of this rank's fragment of a slot."""

    outline: Mapping[str, Any]
    """by key; what has few bits is there without values"""
    cut: frozenset[str]
    """the keys under which there is something of each element"""
    coded: Mapping[str, Coded]
    """what has few bits"""


class Saved:
    """What one engine has for a checkpoint, by the names of this package."""

    def __init__(self, context: EngineContext, window: Window, step: OptimizerStep, faults: Faults) -> None:
        self._context, self._runtime, self._control = context, context.runtime, context.control
        self._window, self._step, self._faults = window, step, faults

    def content(self, client: Mapping[str, Any], data: Any, in_thread: bool) -> Callable[[], Content]:
        """What this rank has to write, once it is asked for. Collective.

        `in_thread`: in another thread, while the engine continues.
        """
        told = {**self._position(data), **self._extra()}
        return partial(self._content, self._own_buffers(), told, client, in_thread)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Rank 0's, by name, and those of this rank that differ from them. Collective."""
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._context.model)}
        digests = {name: digest(buffer) for name, buffer in buffers.items()}
        first = self._control.broadcast_object(digests, label="the buffers")
        if (rank := self._control.rank) == 0:
            return {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        return {f"rank/{rank}/buffer/{name}": b for name, b in buffers.items() if first.get(name) != digests[name]}

    def _position(self, data: Any) -> dict[str, Any]:
        """The position of a loader. Collective."""
        return {} if data is None else self._own("data", plain.encode(data.state_dict(), "data.state_dict()"))

    def _extra(self) -> dict[str, Any]:
        """The extra state of modules. Collective."""
        extra = {name: module.get_extra_state() for name, module in extra_states(self._context.model).items()}
        return self._own("extra", {name: plain.encode(state, name) for name, state in extra.items()}) if extra else {}

    def _own(self, name: str, mine: Any) -> dict[str, Any]:
        """A value of rank 0, and that of this rank where it is another one. Collective."""
        first = self._control.broadcast_object(mine, label=f"the {name}")
        if (rank := self._control.rank) == 0:
            return {name: mine}
        return {} if mine == first else {f"rank/{rank}/{name}": mine}

    def _content(
        self, buffers: Mapping[str, torch.Tensor], told: Mapping[str, Any], client: Mapping[str, Any], in_thread: bool
    ) -> Content:
        """What this rank has to write; of its values, those in `told` are known."""
        self._runtime.transfers.finish()
        rank, buckets, optimizer = self._control.rank, self._runtime.buckets.values(), self._context.optimizer
        if optimizer is not None and (odd := optimizer.offload.uncuttable()):
            raise EngineError(f"[ZW606] {odd}")
        outlines = ((bucket, bucket.shard.to("meta")) for bucket in buckets)
        parts = [part for bucket, shard in outlines for part, _ in self._pieces(bucket, shard)]
        others = [(Part.of(name, value), value) for name, value in buffers.items()]
        values = {f"rank/{rank}/random": plain.encode(random_numbers.states(self._context.device), "random"), **told}
        values |= {name: value for bucket in buckets for name, value in self._scalars(bucket)}
        if rank == 0:
            stored = plain.Stored("client")
            values |= self._facts() | {"client": plain.encode(dict(client), "client_state", stored)}
            others += [(Part.of(name, value), value) for name, value in stored.tensors.items()]
        parts += [part for part, _ in others]
        if not in_thread:
            return Content(parts, self._faults.amid(self._tensors(others), "write"), values)
        resting = {bucket.id: self._at_rest(bucket) for bucket in buckets}
        snapshots = {
            bucket: self._runtime.transfers.snapshot([tensor for portion in each for tensor in portion.tensors])
            for bucket, each in resting.items()
        }
        copies = [value.to("cpu", copy=True) for part, value in others if part.numel]  # they change before an `Update`
        tensors = chain(
            chain.from_iterable(_whole(snapshots[bucket], each) for bucket, each in resting.items()), copies
        )
        begun = {bucket: self._faults.before(snapshot, "start", "stage") for bucket, snapshot in snapshots.items()}
        return Content(parts, self._faults.amid(tensors, "write"), values, begun)

    def _at_rest(self, bucket: Bucket) -> list[_Portion]:
        """What holds the values of `_pieces`, in the same order."""
        portions: list[_Portion] = []
        for index, _, fragment in _fragments(bucket):
            if fragment.numel:
                held = [bucket.fragment(tensor, index) for tensor in bucket.home.at_rest]
                portions += _portions(held, [_AT_ONCE] * len(held), whole)
                outline, cut, coded = self._held(bucket, index)
                for key, value in outline.items():
                    if key in coded:
                        portions += _portions(coded[key], [_AT_ONCE, _AT_ONCE // BLOCK], lambda at: decode(Coded(*at)))
                    elif key in cut:
                        portions += _portions([value], [_AT_ONCE], whole)
        return portions

    def _tensors(self, others: Sequence[tuple[Part, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """What is written, in host memory, in the order of the parts; `others`: those outside buckets."""
        buckets = self._runtime.buckets.values()
        pieces = (self._pieces(bucket, bucket.values().cpu(), decoded=True) for bucket in buckets)
        for part, value in chain(chain.from_iterable(pieces), others):
            if part.numel:
                yield value.cpu()

    def _pieces(
        self, bucket: Bucket, shard: torch.Tensor, decoded: bool = False
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """What this rank has of a bucket's parameters, in its `shard`, and what the optimizer keeps of their elements.

        `decoded`: what has few bits has its values.
        """
        for index, name, fragment in _fragments(bucket):
            shape, mine = bucket.layout.slots[index].shape, bucket.fragment(shard, index)
            yield Part(f"param/{name}", shape, mine.dtype, fragment.offset, fragment.numel), mine
            held, cut, coded = self._held(bucket, index)
            if coded and decoded and self._context.optimizer is not None:
                held = self._context.optimizer.state_of(bucket.id, index)
            for key, value in held.items():
                if key in cut:
                    part = f"state/{name}/{quoted(key)}"
                    yield Part(part, shape, value.dtype, fragment.offset, fragment.numel), value

    def _scalars(self, bucket: Bucket) -> Iterator[tuple[str, Any]]:
        """What the optimizer keeps of whole parameters, encoded: told by the first rank that has something of one."""
        layout = bucket.layout
        for index, slot in enumerate(() if bucket.copy else layout.slots):
            sizes = [layout.fragment(index, rank).numel for rank in range(bucket.rank + 1)]
            if not sizes[-1] or any(sizes[:-1]):
                continue
            held, cut, _ = self._held(bucket, index)
            for key, value in held.items():
                if key not in cut:
                    name = f"{layout.keys(slot.name)[bucket.number]}/{quoted(key)}"
                    yield f"scalar/{name}", plain.encode(value, f"the optimizer's state {name}")

    def _held(self, bucket: Bucket, slot: int) -> _Held:
        """EngineError where a checkpoint has no names for it."""
        if self._context.optimizer is None or not bucket.layout.trainable:
            return _Held({}, frozenset(), {})
        offload = self._context.optimizer.offload
        outline = offload.outline_of(bucket.id, slot)
        if others := [key for key in outline if type(key) is not str]:
            raise EngineError(
                f"[ZW606] the optimizer keeps its state under {others[0]!r}: a checkpoint needs a string there"
            )
        return _Held(outline, offload.cut_of(bucket.id, slot), offload.coded(bucket.id, slot))

    def _facts(self) -> dict[str, Any]:
        """What all ranks share."""
        optimizer, scheduler = self._context.optimizer, self._step.lr_scheduler
        facts: dict[str, Any] = {
            "model": plain.encode(self._model().model_dump(), "model"),
            "run": {"micro_steps": self._window.micro_steps, "skipped_steps": self._step.skipped},
            "loss_scale": plain.encode(self._step.scaler.loss_scale.state(), "the loss scale"),
        }
        if optimizer is not None:
            users = optimizer.optimizer
            self._tell_of_the_rest(users)
            facts["optimizer"] = {"kind": kind_of(users), "groups": self._groups(users)}
        if scheduler is not None:
            state = plain.encode(scheduler.state_dict(), "lr_scheduler.state_dict()")
            facts["lr_scheduler"] = {"kind": kind_of(scheduler), "state": state}
        return facts

    def _tell_of_the_rest(self, optimizer: torch.optim.Optimizer) -> None:
        """Ranks may hold other values there, of any type: the program knows what to do with them."""
        others = {key: held for key, held in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        rest = [repr(key) for key, held in others.items() if not isinstance(held, Mapping) or held]
        if rest:
            warn(
                f"the checkpoint leaves out what the optimizer keeps of no parameter, under {', '.join(rest)} of its "
                "state: hand it to save() as client_state, and put it back behind load()",
                self._context.control.rank,
            )

    def _model(self) -> Model:
        """What an export without an engine needs besides the tensors."""
        dtypes, aliases = {}, {}
        for key, canonical, slot in keys(self._context):
            dtypes[canonical] = NAMES[self._context.original_dtypes[slot.name]]
            if key != canonical:
                aliases[key] = canonical
        buffers = {id(buffer): name for name, buffer in reversed([*persistent_buffers(self._context.model)])}
        for name, buffer in persistent_buffers(self._context.model, every_name=True):
            aliases |= {name: buffers[id(buffer)]} if name != buffers[id(buffer)] else {}
        configs: list[tuple[str, Any]] = [(name, getattr(self._context.model, name, None)) for name in CONFIGS]
        texts = {name: config.to_json_string() for name, config in configs if hasattr(config, "to_json_string")}
        return Model(dtypes=dtypes, aliases=aliases, configs=texts)

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        names = names_of(self._context)
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


def _fragments(bucket: Bucket) -> Iterator[tuple[int, str, Fragment]]:
    """The slots of which this rank saves something, with their NAME; one without elements is the first rank's."""
    layout = bucket.layout
    for index, slot in enumerate(() if bucket.copy else layout.slots):
        fragment = layout.fragment(index, bucket.rank)
        if fragment.numel or not (slot.numel or bucket.rank):
            yield index, layout.keys(slot.name)[bucket.number], fragment


def _portions(held: Sequence[torch.Tensor], sizes: Sequence[int], values: _Values) -> Iterator[_Portion]:
    """What a fragment is `held` in, cut into so many elements of each."""
    pieces = (tensor.detach().split(size) for tensor, size in zip(held, sizes, strict=True))
    return (_Portion(portion, values) for portion in zip(*pieces, strict=True))


def _whole(snapshot: Snapshot, portions: Sequence[_Portion]) -> Iterator[torch.Tensor]:
    """The values that such portions held, which are what `snapshot` is of; each until the next is asked for."""
    read = snapshot.read()
    for portion in portions:
        kept = [tensor.clone() for tensor in islice(read, len(portion.tensors) - 1)]
        for last in islice(read, 1):  # it ends early where the save was stopped
            yield portion.values([*kept, last])


class Loaded:
    """Puts a checkpoint, by the names of this package, into one engine."""

    def __init__(self, context: EngineContext, window: Window, step: OptimizerStep) -> None:
        self._context, self._runtime, self._control = context, context.runtime, context.control
        self._window, self._step = window, step

    def wanted(self) -> Wanted:
        """What the engine has for a checkpoint to fit."""
        buckets = self._runtime.buckets.values()
        held = [(key, slot, b) for b in buckets for slot in b.layout.slots for key in b.layout.keys(slot.name)]
        parameters = {key: slot.shape for key, slot, _ in held}
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(self._context.model)}
        optimizer, scheduler = self._context.optimizer, self._step.lr_scheduler
        extra = extra_states(self._context.model).keys()
        if optimizer is None:
            return Wanted(parameters, buffers, extra=extra)
        names = names_of(self._context)
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
        modules = extra_states(self._context.model)
        for name, state in compatibility.extra(self._control.rank).items():
            if name in modules:
                modules[name].set_extra_state(state)

    @torch.no_grad()
    def load(self, reader: Reader, compatibility: Compatibility) -> None:
        """Takes what fits: see `Compatibility.check`."""
        facts, optimizer, scheduler = compatibility.facts, self._context.optimizer, self._step.lr_scheduler
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
        self._context.progress.resume(reader.manifest.step)
        self._window.resume(facts.run.micro_steps)
        self._step.resume(facts.run.skipped_steps, facts.loss_scale.model_dump())

    def _load_parameters(self, bucket: Bucket, reader: Reader) -> None:
        layout, shard = bucket.layout, bucket.values().to("cpu", copy=True)
        for index, slot in enumerate(layout.slots):
            name = f"param/{layout.keys(slot.name)[bucket.number]}"
            fragment = layout.fragment(index, bucket.rank)
            if fragment.numel and name in reader.manifest.tensors:
                bucket.fragment(shard, index).copy_(reader.read(name, fragment.offset, fragment.numel))
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
            fragment, name = layout.fragment(index, bucket.rank), layout.keys(slot.name)[bucket.number]
            if not fragment.numel or f"param/{name}" not in reader.manifest.tensors:
                continue
            state = states[index] = {}
            for key in compatibility.cut.get(name, ()):
                read = reader.read(f"state/{name}/{quoted(key)}", fragment.offset, fragment.numel)
                if (key, read.dtype) not in shards:
                    shards[key, read.dtype] = torch.zeros(layout.shard_numel, dtype=read.dtype, device=home)
                state[key] = bucket.fragment(shards[key, read.dtype], index).copy_(read)
            for key, value in compatibility.scalars.get(name, {}).items():
                at = optimizer.home_of_scalars(bucket.id, index, key)
                state[key] = value.to(at, copy=True) if isinstance(value, torch.Tensor) else value
        return states

    def _load_buffers(self, reader: Reader, compatibility: Compatibility) -> None:
        for name, buffer in persistent_buffers(self._context.model):
            saved = compatibility.buffer(name, self._control.rank)
            if saved in reader.manifest.tensors:
                buffer.copy_(reader.whole(saved))


def _clashes(scheduler: Any, key: Any, value: Any) -> bool:
    """True if a value would take the place of a method, or of the number of steps without being one."""
    if not isinstance(key, str) or callable(getattr(type(scheduler), key, None)):
        return True
    return key in ("last_epoch", "_step_count") and not isinstance(value, int | float | torch.Tensor)
