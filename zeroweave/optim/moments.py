"""What an optimizer keeps of each element of a bucket's fragments."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

from zeroweave.optim.fragments import Fragments

State = MutableMapping[Any, dict[str, Any]]
Kind = tuple[str, torch.dtype]


class FragmentMoment(NamedTuple):
    """One moment of one fragment: `held[key]`, with its place at `start` of all of that kind of the bucket."""

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
