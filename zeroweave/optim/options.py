"""The options by which all ranks have to update alike: each has a part of every parameter."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import torch

NAMES: Final = ("lr", "weight_decay", "momentum", "betas", "eps")
"""Those that a program sets and no optimizer does. What an optimizer counts in a group may differ between ranks."""
_ALIKE: Final = 1e-5
"""Numbers are equal within this share: schedulers compute on the host, whose last bits depend on its CPU."""
_NOTHING: Final = 1e-12
"""So are numbers that differ by no more: what a cosine leaves in the end."""

Options = Mapping[str, Mapping[str, object]]
"""Of each group, by what people call it: `NAMES` and their values, each as `comparable` gives it."""


def shared_options(optimizer: torch.optim.Optimizer, groups: Collection[int]) -> dict[str, dict[str, object]]:
    """Those of the groups of these numbers, without what only a device can compare."""
    return {
        f"param_groups[{index}]": {name: comparable(group[name]) for name in NAMES if name in group}
        for index, group in enumerate(optimizer.param_groups)
        if index in groups
    }


def clipping(limits: Sequence[float]) -> dict[str, dict[str, object]]:
    """The same of norms that gradients were clipped to."""
    return {"clip_grad_norm_": {"max_norm": comparable(limits)}}


def comparable(value: Any) -> object:
    """A float, also of a tensor in host memory, or a list of such; None for what cannot be compared."""
    if type(value) is float:
        return value
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return math.inf


def packed(options: Options) -> bytes:
    """Equal for options that are alike, but for few numbers that are so within the last bits only.

    As float32, which is read into bytes at once: this is done in each step.
    """
    numbers = array("f")
    for each in options.values():
        for value in each.values():
            numbers.extend(_numbers(value))
    return numbers.tobytes()


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list):
        return [len(value), *(number for item in value for number in _numbers(item))]
    return [math.nan if value is None else 0.0 if abs(value) < _NOTHING else value]


def difference(one: Options, other: Options) -> tuple[str, object, object] | None:
    """The name of the first option that differs, and both values; None where all that can be compared are alike."""
    for place, options in one.items():
        for name, value in options.items():
            if not _alike(value, there := other.get(place, {}).get(name)):
                return f"{name!r} of {place}", value, there
    return None


def _alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, list) or isinstance(other, list):
        return False
    return math.isclose(one, other, rel_tol=_ALIKE, abs_tol=_NOTHING) or (math.isnan(one) and math.isnan(other))


def set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """An option that is a tensor, such as a learning rate that is captured, stays that tensor; no other becomes one."""
    for key, value in saved.items():
        now = group.get(key)
        if isinstance(now, torch.Tensor):
            now.copy_(torch.as_tensor(value, dtype=now.dtype, device="cpu"))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and key in group else value
