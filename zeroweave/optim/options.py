"""The options of an optimizer's groups by which all ranks have to step alike."""

from __future__ import annotations

from numbers import Real
from typing import Any, Final

import torch

_MEMBERS: Final = frozenset({"params", "param_names"})


class Options:
    """Of one optimizer: those that its groups have now. What a program adds to them later is its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._keys = [sorted(group.keys() - _MEMBERS) for group in optimizer.param_groups]

    def comparable(self) -> dict[str, dict[str, object]]:
        """Those that can be compared without asking the device, by what people call the group, and by name.

        They are numbers, words, and lists of these. A number is a float in it, and a tuple a list, so that ranks are
        alike whose values are equal. A tensor is not in it, as a learning rate may be one, nor is any other object.
        """
        groups = zip(self._optimizer.param_groups, self._keys, strict=False)
        return {
            f"param_groups[{index}]": {key: value for key in keys if (value := _plain(group.get(key))) is not None}
            for index, (group, keys) in enumerate(groups)
        }


def _plain(value: Any) -> object:
    """None where it cannot be compared."""
    kind = type(value)
    if kind is float:
        return value or 0.0  # and not -0.0
    if kind is str:
        return value
    if isinstance(value, Real):
        try:
            return float(value) or 0.0
        except OverflowError:
            return str(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else None
