"""The options by which all ranks have to update alike: each has a part of every parameter."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, Final

import torch

NAMES: Final = ("lr", "weight_decay", "momentum", "betas", "eps")
"""Those that a program sets and no optimizer does. What an optimizer counts in a group may differ between ranks."""
_ALIKE: Final = 1e-5
"""Numbers are equal within this share: schedulers compute on the host, whose last bits depend on its CPU."""
_NOTHING: Final = 1e-12
"""So are numbers that differ by no more: what a cosine leaves in the end."""

Options = Mapping[str, Sequence[float | None]]
"""What people call each option, and its numbers; None for what cannot be compared."""


def shared_options(optimizer: torch.optim.Optimizer, groups: Collection[int]) -> Options:
    """Those of the groups with these indices, without what only a device can compare."""
    return {
        f"{name!r} of param_groups[{index}]": numbers_of(group[name])
        for index, group in enumerate(optimizer.param_groups)
        if index in groups
        for name in NAMES
        if name in group
    }


def numbers_of(value: Any) -> tuple[float | None, ...]:
    """Those of a number, of a tensor in host memory that is one, or of a list of such."""
    if isinstance(value, list | tuple):
        return tuple(chain.from_iterable(map(numbers_of, value)))
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    try:
        return (float(value) if isinstance(value, Real) else None,)
    except OverflowError:
        return (math.inf,)


def packed(options: Options) -> bytes:
    """Equal for options that are alike, but for few numbers that are so within the last bits only.

    As float32, which is read into bytes at once: this is done in each step.
    """
    numbers = array("f")
    for values in options.values():
        numbers.append(len(values))
        numbers.extend(math.nan if v is None else 0.0 if abs(v) < _NOTHING else v for v in values)
    return numbers.tobytes()


def difference(one: Options, other: Options) -> tuple[str, Sequence[float | None], Sequence[float | None]] | None:
    """The name of the first option that differs, and both values; None where all that can be compared are alike."""
    for name, here in one.items():
        there = other.get(name, here)
        if len(here) != len(there) or not all(map(_alike, here, there)):
            return name, here, there
    return None


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return True
    return math.isclose(one, other, rel_tol=_ALIKE, abs_tol=_NOTHING) or (math.isnan(one) and math.isnan(other))


def set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """An option that is a tensor, such as a learning rate that is captured, stays that tensor; no other becomes one."""
    for key, value in saved.items():
        now = group.get(key)
        if isinstance(now, torch.Tensor):
            now.copy_(torch.as_tensor(value, dtype=now.dtype, device="cpu"))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and key in group else value
