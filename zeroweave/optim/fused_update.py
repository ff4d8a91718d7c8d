"""Updates in one pass: a kernel reads gradient, master and moments of a range of a shard, and writes the latter.

It is for optimizers of torch whose rule is known here, on GPUs. They keep their states, options and step counters, as
if they had made the step. A range is what is adjacent in a shard, of one group of parameters, at one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroweave._torch.foreach import foreach_add_
from zeroweave._torch.storages import storage_key, version
from zeroweave.errors import ParameterError
from zeroweave.layout import SlotKey
from zeroweave.optim.compact import CompactMoments
from zeroweave.optim.fragments import Fragments
from zeroweave.optim.rules import Kernels, Launch, Masters, Rule
from zeroweave.optim.scaler import Scaled
from zeroweave.optim.states import counts_on_device
from zeroweave.runtime.bucket import Bucket

State = dict[str, Any]


class _Slot(NamedTuple):
    slot: int
    start: int
    stop: int
    group: int
    """-1: it is in none, and never updated"""
    fragment: nn.Parameter


class Range(NamedTuple):
    """Slots of one group side by side in a shard, and the tensors of their states."""

    slots: tuple[_Slot, ...]
    moments: tuple[torch.Tensor, ...]
    """by key, of the whole range"""
    states: tuple[State, ...]
    """by slot"""
    held: tuple[tuple[State, str, torch.Tensor], ...]
    """what the states had when this was made"""
    steps: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    """how often each of these had been written"""
    step: int
    """how many it has made"""
    first: bool

    @property
    def group(self) -> int:
        return self.slots[0].group

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def stop(self) -> int:
        return self.slots[-1].stop

    def holds(self, now: Mapping[Any, State]) -> bool:
        """True if the optimizer, with its states of `now`, still has those tensors, and counters as they were left."""
        same = all(now.get(slot.fragment) is state for slot, state in zip(self.slots, self.states, strict=True))
        held = same and all(state.get(key) is tensor for state, key, tensor in self.held)
        return held and _versions(self.steps) == self.versions


class OnePass:
    """The updates of one optimizer by kernels, which follow its `rule`.

    `groups`: (bucket id, slot) -> index of its group of parameters. `compact`: by bucket, where its moments
    have few bits; of all buckets or of none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        buckets: Mapping[int, Bucket],
        fragments: Mapping[int, Fragments],
        groups: Mapping[SlotKey, int],
        kernels: Kernels,
        compact: Mapping[int, CompactMoments],
    ) -> None:
        self._optimizer, self._rule, self._buckets, self._fragments = optimizer, rule, buckets, fragments
        self._kernels, self._compact = kernels, compact
        self._slots = {
            bucket: [
                _Slot(slot, part.start, part.start + part.numel, groups.get((bucket, slot), -1), fragment)
                for slot, fragment in enumerate(fragments[bucket].parameters)
                if (part := each.layout.fragment(slot, each.rank)).numel
            ]
            for bucket, each in buckets.items()
        }
        self._known: dict[int, tuple[object, list[Range]]] = {}
        """by bucket: what its ranges were cut by, and they"""
        self._behind: dict[int, dict[int, tuple[torch.Tensor, int, int]]] = {}
        """of offloaded buckets: bucket id -> slot -> step counter, its version, its value: the device is not asked"""

    def takes(self, bucket: int) -> bool:
        """True if the bucket can be updated here, as its options are now. Else the optimizer steps itself.

        It does so where the learning rate is a tensor on a GPU, which the host would have to wait for.
        """
        fits = all(self._rule.fits(group) and _on_host(group["lr"]) for group in self._optimizer.param_groups)
        return fits and self._buckets[bucket].shard.dtype == torch.float32

    @torch.no_grad()
    def update(self, bucket: int, masters: Masters, gradient: Scaled, absent: Set[int]) -> None:
        """Updates the masters and states of a bucket but for the slots in `absent`."""
        groups = self._optimizer.param_groups
        ranges, view = self._ranges(bucket, frozenset(absent)), self._buckets[bucket]
        first, _ = view.layout.shard_range(view.rank)
        for index, each in enumerate(ranges):
            group = groups[each.group]
            if each.steps:
                foreach_add_(each.steps, 1.0)
            masters_of = masters.of(each.start, each.stop)
            part = Scaled(gradient.values[each.start : each.stop], gradient.factor)
            step = each.step + 1
            launch = Launch(masters_of, part, each.moments, each.first, group, step, first + each.start)
            launch.issue(self._kernels, self._rule.own(self._kernels, launch))
            ranges[index] = each._replace(step=step, first=False, versions=_versions(each.steps))

    def release(self, bucket: int) -> None:
        """The tensors of the states go elsewhere, and none is kept here."""
        _, known = self._known.pop(bucket, (None, []))
        behind = self._behind.setdefault(bucket, {})
        for each in known:
            counted = zip(each.slots, each.steps, each.versions, strict=False)
            behind |= {slot.slot: (counter, then, each.step) for slot, counter, then in counted}

    def forget(self, buckets: Iterable[int]) -> None:
        """Other code writes into the states of these: step counters may stay the same tensors with other numbers."""
        for bucket in buckets:
            self._known.pop(bucket, None)
            self._behind.pop(bucket, None)

    def _ranges(self, bucket: int, absent: frozenset[int]) -> list[Range]:
        cut = absent, [self._rule.moments(group) for group in self._optimizer.param_groups]
        before, known = self._known.get(bucket, (None, []))
        if before != cut or not all(each.holds(self._optimizer.state) for each in known):
            known = list(self._cut(bucket, absent))
            self._known[bucket] = cut, known
        return known

    def _cut(self, bucket: int, absent: Set[int]) -> Iterator[Range]:
        """The ranges of a bucket, with states for those that had none."""
        if bucket in self._compact:
            self._compact[bucket].let_go()
        kinds = list[tuple[_Slot, tuple[int, int, bool] | None]]()
        for slot in self._slots[bucket]:
            if slot.group < 0 or slot.slot in absent:
                kinds.append((slot, None))
                continue
            group, state = self._optimizer.param_groups[slot.group], self._optimizer.state[slot.fragment]
            keys = () if bucket in self._compact else self._rule.moments(group)
            if (first := any(state.get(key) is None for key in keys)) and self._rule.born:
                raise ParameterError(
                    f"[ZW302] the optimizer's state of a parameter lacks {', '.join(keys)}: load one that has it"
                )
            step = self._step(bucket, slot, group, state) if self._rule.counts else 0
            kinds.append((slot, (slot.group, step, first)))
        for kind, together in groupby(kinds, key=lambda each: each[1]):
            slots = [slot for slot, _ in together]
            if kind is not None:
                yield self._range(bucket, slots, *kind[1:])

    def _step(self, bucket: int, slot: _Slot, group: Mapping[str, Any], state: State) -> int:
        """How many steps a slot has made. Waits for the device where only that knows."""
        if "step" not in state:
            home = slot.fragment.device if counts_on_device(group) else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=home)
            return 0
        counter, then, step = self._behind.get(bucket, {}).get(slot.slot, (None, 0, 0))
        known = counter is not None and counter is state["step"] and version(counter) == then
        return step if known else int(state["step"])

    def _range(self, bucket: int, slots: Sequence[_Slot], step: int, first: bool) -> Range:
        group = self._optimizer.param_groups[slots[0].group]
        states = tuple(self._optimizer.state[slot.fragment] for slot in slots)
        keys, steps = self._rule.moments(group), ("step",) if self._rule.counts else ()
        if (compact := self._compact.get(bucket)) is not None:
            moments = compact.moments([slot.slot for slot in slots], keys, slots[0].start, slots[-1].stop)
            keys = ()
        else:
            moments = tuple(_side_by_side(slots, states, key) for key in keys)
        held = tuple((state, key, state[key]) for state in states for key in (*keys, *steps))
        counters = tuple(state[key] for state in states for key in steps)
        return Range(tuple(slots), moments, states, held, counters, _versions(counters), step, first)


def _on_host(rate: float | torch.Tensor) -> bool:
    return not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"


def _versions(counters: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """How often they were written in place, as autograd counts."""
    return tuple(map(version, counters))


def _side_by_side(slots: Sequence[_Slot], states: Sequence[State], key: str) -> torch.Tensor:
    """One tensor of which the states' are views, each at its slot's offset. It is made if need be."""
    base, tensors = slots[0].start, [state.get(key) for state in states]
    numel = slots[-1].stop - base
    first = tensors[0]
    if first is not None:
        there = first.untyped_storage().nbytes() // first.itemsize - first.storage_offset()
        alike = all(
            t is not None
            and t.dtype == torch.float32
            and storage_key(t) == storage_key(first)
            and t.storage_offset() - first.storage_offset() == slot.start - base
            for slot, t in zip(slots, tensors, strict=True)
        )
        if alike and there >= numel:
            return first.as_strided((numel,), (1,))
    whole = torch.zeros(numel, dtype=torch.float32, device=slots[0].fragment.device)
    for slot, state, tensor in zip(slots, states, tensors, strict=True):
        view = whole[slot.start - base : slot.stop - base]
        if tensor is not None:
            view.copy_(tensor)
        state[key] = view
    return whole
