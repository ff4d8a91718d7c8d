"""What of each parameter is in this rank's shard, and what the optimizer keeps of it."""

from __future__ import annotations

from collections.abc import MutableMapping, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroweave.runtime.bucket import Bucket

State = MutableMapping[Any, dict[str, Any]]
Kind = tuple[str, torch.dtype]


class Fragments:
    """One `nn.Parameter` per slot, each a 1-D view of the bucket's shard, empty where this rank has no element.

    They view the shard, without memory while that has none, or what `point` says. The shard is the master: it has at
    least float32 where its parameters are trained. An empty fragment never gets a gradient, so optimizers skip it and
    keep no state for it. Costs no memory besides the shard.
    """

    def __init__(self, bucket: Bucket) -> None:
        layout, rank = bucket.layout, bucket.rank
        self._dtype, self._home = bucket.shard.dtype, bucket.home
        parts = [layout.fragment(slot, rank) for slot in range(len(layout.slots))]
        self._ranges = [(part.start, part.start + part.numel) for part in parts]
        self.parameters = tuple(nn.Parameter(view) for view in self._home.cut(self._ranges))
        self.starts = tuple(start for start, _ in self._ranges)
        self.numel = bucket.shard.numel()
        self.nbytes = bucket.shard.nbytes

    def point(self, lifted: torch.Tensor) -> None:
        """Makes the fragments views of a tensor that is laid out like the shard."""
        if lifted is not self._home.master:
            for parameter, (start, stop) in zip(self.parameters, self._ranges, strict=True):
                parameter.data = lifted[start:stop]

    def point_home(self) -> None:
        """Makes the fragments views of the shard, wherever that lives now."""
        for parameter, view in zip(self.parameters, self._home.cut(self._ranges), strict=True):
            parameter.data = view

    def set_gradients(self, gradient: torch.Tensor, absent: Set[int]) -> None:
        """Gives each fragment its view of `gradient` [shard_numel], any floating dtype.

        It is cast to the shard's dtype once, and not copied where it has it. Slots in `absent` get None.
        """
        gradient = gradient.to(self._dtype)
        for slot, (parameter, (start, stop)) in enumerate(zip(self.parameters, self._ranges, strict=True)):
            parameter.grad = gradient[start:stop] if start < stop and slot not in absent else None

    def drop_gradients(self) -> None:
        """Drops the gradient."""
        for parameter in self.parameters:
            parameter.grad = None


class FragmentMoment(NamedTuple):
    """One moment of one fragment: `held[key]`, which begins at `start` of all of that kind of the bucket."""

    slot: int
    start: int
    held: dict[str, Any]
    key: str

    @property
    def value(self) -> torch.Tensor:
        value: torch.Tensor = self.held[self.key]
        return value

    @property
    def kind(self) -> Kind:
        return self.key, self.value.dtype

    def view(self, all_of_the_kind: torch.Tensor) -> torch.Tensor:
        return all_of_the_kind[self.start : self.start + self.value.numel()]


def moments_of(fragments: Fragments, state: State) -> list[FragmentMoment]:
    """What an optimizer keeps of the fragments of a bucket, of their shapes."""
    return [
        FragmentMoment(slot, start, held, key)
        for slot, (parameter, start) in enumerate(zip(fragments.parameters, fragments.starts, strict=True))
        for held in (state.get(parameter),)
        if held and parameter.numel()
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
