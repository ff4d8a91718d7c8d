"""The moments of a bucket in 8 bits an element: between two updates the optimizer's state has none in float32.

    land     the update finds them in float32: `optimizer.state` refers to them
    lower    they are coded, see `optim.quantize8`, and `optimizer.state` drops them

Step counters, and all else that an optimizer keeps, stay in its state. That decides: where it has no step counter of a
parameter, since the program has emptied it for instance, there are no moments either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from zeroweave._torch.storages import storage_key
from zeroweave.comm.rounding import noise_
from zeroweave.errors import ParameterError, listed
from zeroweave.layout import BucketLayout
from zeroweave.optim.fragments import FragmentMoment, Fragments, moments_of
from zeroweave.optim.quantize8 import Coded, decode, encode_
from zeroweave.runtime.bucket import Bucket

CODES: Final[Mapping[str, torch.dtype]] = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
"""What is coded, by its key, and how."""
_OPTIMIZERS: Final = frozenset({torch.optim.Adam, torch.optim.AdamW})
"""Exact types: a subclass may do other things."""
_REFUSED: Final[Mapping[str, str]] = {
    "amsgrad": "with precision.optimizer 'compact' it has to be False: largest moments would grow with each rounding"
}
"""Options of groups that have to be off, and why."""
State = Mapping[str, Any]


def refuse_compact(optimizer: torch.optim.Optimizer | None, layouts: Iterable[BucketLayout]) -> None:
    """ParameterError where `precision.optimizer` "compact" cannot be done; nothing was changed.

    Without an optimizer, too: masters would be rounded then, and nothing saved that an update needs.
    """
    reasons, trained = [], [each for each in layouts if each.trainable]
    if optimizer is None or type(optimizer) not in _OPTIMIZERS:
        given = "there is no optimizer" if optimizer is None else f"not for {type(optimizer).__name__}"
        reasons.append(f"it is for one torch.optim.Adam or AdamW, and {given}")
    else:
        reasons += [f"its {option}" for option in refused_in(optimizer.param_groups)]
    wide = [slot.name for each in trained if each.dtype != "bfloat16" for slot in each.slots]
    if not trained:
        reasons.append("it is for parameters that are trained, and there are none")
    if wide:
        reasons.append(f"it is for bfloat16 parameters, and not {listed(wide)}: set precision.params to 'bfloat16'")
    if reasons:
        lines = "\n".join(f"  {reason}" for reason in reasons)
        raise ParameterError(
            f"[ZW301] precision.optimizer 'compact' cannot be used; nothing was changed:\n{lines}\n  or set it to "
            "'full'"
        )


def refused_in(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those options of groups of parameters that have to be off, in words."""
    numbered = ((index, key) for index, group in enumerate(groups) for key in _REFUSED if group.get(key))
    return [f"group {index} has {key}: {_REFUSED[key]}" for index, key in numbered]


class CompactMoments:
    """The moments of one bucket. They take about 2.1 bytes an element at rest."""

    def __init__(self, bucket: Bucket, fragments: Fragments, optimizer: torch.optim.Optimizer) -> None:
        self._bucket, self._fragments, self._optimizer = bucket, fragments, optimizer
        self.coded: dict[str, Coded] = {}
        """by key, of the whole shard; zeros where a slot has none"""
        self.slots: dict[int, list[str]] = {}
        """slot -> the keys that are coded of it"""
        self._lifted: dict[str, torch.Tensor] = {}
        self.lower()

    # ------------------------------------------------------------------ around an update
    def land(self) -> None:
        """The state refers to float32 copies."""
        self.let_go()
        self._lifted = {key: decode(coded) for key, coded in self.coded.items()}
        for slot, keys in self.slots.items():
            held = self._optimizer.state[self._fragments.parameters[slot]]
            for key in keys:
                held[key] = self._bucket.fragment(self._lifted[key], slot)

    def drop(self) -> None:
        """The state drops the copies; what was coded stays as it is."""
        for slot, keys in self.slots.items():
            held = self._optimizer.state[self._fragments.parameters[slot]]
            for key in keys:
                held.pop(key, None)
        self._lifted = {}

    def lose(self) -> None:
        """The same after an update that cannot be coded. What the optimizer began with it begins again."""
        self.drop()
        for moment in self._moments():
            moment.held.clear()

    def lower(self, random: torch.Tensor | None = None) -> None:
        """What the state has of elements is coded, and no longer in it. `random`: see `codes.encode_`."""
        moments = self._moments()
        for moment in moments:
            key, value = moment.key, moment.value
            if key not in self._lifted:
                self._lifted[key] = torch.zeros(self._fragments.numel, dtype=torch.float32, device=value.device)
            lifted = self._lifted[key]
            if storage_key(value) != storage_key(lifted):  # the optimizer or the program has just put it there
                moment.view(lifted).copy_(value)
        for key, values in self._lifted.items():
            coded = self.coded.get(key) or Coded.zeros(values.numel(), CODES[key], values.device)
            encode_(coded, values, random)
            self.coded[key] = coded
        for moment in moments:
            keys = self.slots.setdefault(moment.slot, [])
            if moment.key not in keys:
                keys.append(moment.key)
            del moment.held[moment.key]
        self._lifted = {}

    def _moments(self) -> list[FragmentMoment]:
        """What the state has in float32."""
        every = moments_of(self._fragments, self._optimizer.state)
        return [moment for moment in every if moment.key in CODES and self._has_stepped(moment.slot)]

    def room_for_noise(self) -> torch.Tensor:
        """int32 [numel / world], of zeros."""
        return torch.zeros(self._fragments.numel, dtype=torch.int32, device=self._bucket.home.source.device)

    def noise_(self, random: torch.Tensor) -> None:
        """Overwrites that with noise for elements at the steps that their parameters are at."""
        first, _ = self._bucket.layout.shard_range(self._bucket.rank)
        for slot, (parameter, start) in enumerate(zip(self._fragments.parameters, self._fragments.starts, strict=True)):
            if parameter.numel() and self._has_stepped(slot):
                step = self._optimizer.state[parameter]["step"]
                on_host = not isinstance(step, torch.Tensor) or step.device.type == "cpu"
                noise_(self._bucket.fragment(random, slot), first + start, int(step) if on_host else step)

    def _has_stepped(self, slot: int) -> bool:
        return "step" in self._optimizer.state.get(self._fragments.parameters[slot], {})

    # ------------------------------------------------------------------ for others
    def parts(self, slot: int) -> dict[str, Coded]:
        """What is coded of a slot's fragment, by key."""
        return self._coded(slot) if self._has_stepped(slot) else {}

    def _coded(self, slot: int) -> dict[str, Coded]:
        """The same, of a slot that is to be forgotten, too."""
        part = self._bucket.layout.fragment(slot, self._bucket.rank)
        keys = self.slots.get(slot, [])
        return {key: self.coded[key].of(part.start, part.start + part.numel) for key in keys}

    def outline(self, slot: int) -> dict[str, torch.Tensor]:
        """What `decode` would make of `parts`, without memory."""
        parts = self.parts(slot).items()
        return {key: torch.empty(each.codes.shape, dtype=torch.float32, device="meta") for key, each in parts}

    def moments(self, slots: Iterable[int], keys: Sequence[str], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """The codes by key, and then the scales, of a range of the shard with these slots, which have moments now."""
        for key in keys:
            if key not in self.coded:
                device = self._bucket.home.source.device
                self.coded[key] = Coded.zeros(self._fragments.numel, CODES[key], device)
        for slot in slots:
            self.slots.setdefault(slot, list(keys))
        parts = [self.coded[key].of(start, stop) for key in keys]
        return (*(part.codes for part in parts), *(part.scales for part in parts))

    def forget(self, slots: Iterable[int]) -> None:
        """These slots have no moments any more."""
        for slot in slots:
            for codes, scales in self._coded(slot).values():
                codes.zero_()
                scales.zero_()
            self.slots.pop(slot, None)

    def let_go(self) -> None:
        """Of slots that the state has nothing of any more nothing is coded. To be called before it has something."""
        self.forget([slot for slot in self.slots if not self._has_stepped(slot)])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for coded in self.coded.values() for tensor in coded]

    @property
    def nbytes(self) -> int:
        return sum(coded.nbytes for coded in self.coded.values())
