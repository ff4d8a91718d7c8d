"""What an engine gives to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import torch

from zeroweave.checkpoint import plain, random_numbers
from zeroweave.checkpoint.compatibility import quoted
from zeroweave.checkpoint.export import CONFIGS, Model
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.writer import Content
from zeroweave.engine.context import EngineContext
from zeroweave.engine.state_dict import extra_states, keys, names_of, persistent_buffers
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.engine.write_check import digest
from zeroweave.errors import EngineError
from zeroweave.layout import Fragment
from zeroweave.notices import warn
from zeroweave.optim.codes import BLOCK, Coded, decode
from zeroweave.optim.several import kind_of
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.ranks.faults import Faults
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.shard import whole
from zeroweave.runtime.transfers import Snapshot

_OWN_OPTIONS: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of an optimizer's groups that belong to this run alone: their parameters, and how they compute."""

_AT_ONCE: Final = 1 << 24
"""Elements that a thread reads in place, while an update waits for it."""

_Held = Callable[[Bucket, int], Mapping[str, Any]]
_Values = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class _Portion(NamedTuple):
    """Tensors at rest, and how to make one of values of them."""

    tensors: tuple[torch.Tensor, ...]
    values: _Values


class Saved:
    """What one engine has for a checkpoint, by the names of this package."""

    def __init__(self, parts: EngineContext, window: Window, step: OptimizerStep, faults: Faults) -> None:
        self._parts, self._runtime, self._control = parts, parts.runtime, parts.control
        self._window, self._step, self._faults = window, step, faults

    def content(self, client: Mapping[str, Any], data: Any, in_thread: bool) -> Callable[[], Content]:
        """What this rank has to write, once it is asked for. Collective.

        `in_thread`: in another thread, while the engine continues.
        """
        told = {**self._position(data), **self._extra()}
        return partial(self._content, self._own_buffers(), told, client, in_thread)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Rank 0's, by name, and those of this rank that differ from them. Collective."""
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._parts.model)}
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
        extra = {name: module.get_extra_state() for name, module in extra_states(self._parts.model).items()}
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
        rank, buckets, optimizer = self._control.rank, self._runtime.buckets.values(), self._parts.optimizer
        if optimizer is not None and (odd := optimizer.offload.uncuttable()):
            raise EngineError(f"[ZW606] {odd}")
        outlines = ((bucket, bucket.shard.to("meta")) for bucket in buckets)
        parts = [part for bucket, shard in outlines for part, _ in self._pieces(bucket, shard, self._outline)]
        others = [(Part.of(name, value), value) for name, value in buffers.items()]
        values = {f"rank/{rank}/random": plain.encode(random_numbers.states(self._parts.device), "random"), **told}
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
        for index, _, place in _fragments(bucket):
            if place.numel:
                held = [bucket.fragment(tensor, index) for tensor in bucket.home.at_rest]
                portions += _portions(held, [_AT_ONCE] * len(held), whole)
                coded, cut = self._coded(bucket, index), self._cut(bucket, index)
                for key, value in self._outline(bucket, index).items():
                    if key in coded:
                        portions += _portions(coded[key], [_AT_ONCE, _AT_ONCE // BLOCK], lambda at: decode(Coded(*at)))
                    elif key in cut:
                        portions += _portions([value], [_AT_ONCE], whole)
        return portions

    def _tensors(self, others: Sequence[tuple[Part, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """What is written, in host memory, in the order of the parts; `others`: those outside buckets."""
        buckets = self._runtime.buckets.values()
        pieces = (self._pieces(bucket, bucket.values().cpu(), self._state) for bucket in buckets)
        for part, value in chain(chain.from_iterable(pieces), others):
            if part.numel:
                yield value.cpu()

    def _pieces(self, bucket: Bucket, shard: torch.Tensor, held: _Held) -> Iterator[tuple[Part, torch.Tensor]]:
        """What this rank has of a bucket's parameters, in its `shard`, and of what the optimizer has `held` of them."""
        for index, name, place in _fragments(bucket):
            shape, mine = bucket.layout.slots[index].shape, bucket.fragment(shard, index)
            yield Part(f"param/{name}", shape, mine.dtype, place.offset, place.numel), mine
            cut = self._cut(bucket, index)
            for key, value in held(bucket, index).items():
                if key in cut:
                    part = f"state/{name}/{quoted(key)}"
                    yield Part(part, shape, value.dtype, place.offset, place.numel), value

    def _scalars(self, bucket: Bucket) -> Iterator[tuple[str, Any]]:
        """What the optimizer keeps of whole parameters, encoded: told by the first rank that has something of one."""
        layout = bucket.layout
        for index, slot in enumerate(() if bucket.copy else layout.slots):
            sizes = [layout.fragment(index, place).numel for place in range(bucket.rank + 1)]
            if not sizes[-1] or any(sizes[:-1]):
                continue
            cut = self._cut(bucket, index)
            for key, value in self._outline(bucket, index).items():
                if key not in cut:
                    name = f"{layout.keys(slot.name)[bucket.number]}/{quoted(key)}"
                    yield f"scalar/{name}", plain.encode(value, f"the optimizer's state {name}")

    def _optimizer_of(self, bucket: Bucket) -> ShardedOptimizer | None:
        """None where nothing is held of the bucket's parameters."""
        return self._parts.optimizer if bucket.layout.trainable else None

    def _state(self, bucket: Bucket, slot: int) -> Mapping[str, Any]:
        optimizer = self._optimizer_of(bucket)
        return {} if optimizer is None else optimizer.state_of(bucket.id, slot)

    def _outline(self, bucket: Bucket, slot: int) -> Mapping[str, Any]:
        """The same, without values of what has few bits; EngineError where a checkpoint has no names for it."""
        optimizer = self._optimizer_of(bucket)
        held: Mapping[str, Any] = {} if optimizer is None else optimizer.offload.outline_of(bucket.id, slot)
        if others := [key for key in held if type(key) is not str]:
            raise EngineError(
                f"[ZW606] the optimizer keeps its state under {others[0]!r}: a checkpoint needs a string there"
            )
        return held

    def _cut(self, bucket: Bucket, slot: int) -> frozenset[str]:
        """Under which keys of `_outline` there is something of each element of a fragment."""
        optimizer = self._optimizer_of(bucket)
        return frozenset() if optimizer is None else optimizer.offload.cut_of(bucket.id, slot)

    def _coded(self, bucket: Bucket, slot: int) -> Mapping[str, Coded]:
        optimizer = self._optimizer_of(bucket)
        return {} if optimizer is None else optimizer.offload.coded(bucket.id, slot)

    def _facts(self) -> dict[str, Any]:
        """What all ranks share."""
        optimizer, scheduler = self._parts.optimizer, self._step.lr_scheduler
        facts: dict[str, Any] = {
            "model": plain.encode(self._model().model_dump(), "model"),
            "run": {"micro_steps": self._window.micro_steps, "skipped_steps": self._step.skipped},
            "loss_scale": plain.encode(self._step.scale_state(), "the loss scale"),
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
                self._parts.control.rank,
            )

    def _model(self) -> Model:
        """What an export without an engine needs besides the tensors."""
        dtypes, aliases = {}, {}
        for key, canonical, slot in keys(self._parts):
            dtypes[canonical] = NAMES[self._parts.original_dtypes[slot.name]]
            if key != canonical:
                aliases[key] = canonical
        buffers = {id(buffer): name for name, buffer in reversed([*persistent_buffers(self._parts.model)])}
        for name, buffer in persistent_buffers(self._parts.model, every_name=True):
            aliases |= {name: buffers[id(buffer)]} if name != buffers[id(buffer)] else {}
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


def _fragments(bucket: Bucket) -> Iterator[tuple[int, str, Fragment]]:
    """The slots of which this rank saves something, with their NAME; one without elements is the first rank's."""
    layout = bucket.layout
    for index, slot in enumerate(() if bucket.copy else layout.slots):
        place = layout.fragment(index, bucket.rank)
        if place.numel or not (slot.numel or bucket.rank):
            yield index, layout.keys(slot.name)[bucket.number], place


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
