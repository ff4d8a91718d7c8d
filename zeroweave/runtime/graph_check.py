"""The check of a graph: its results beside those of its code, with the same arguments and random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroweave.runtime.graph_recording import Run, distinct, part_of


class GraphCheck:
    """One check, begun before the graph is launched: it has copies of the arguments, which the graph may write."""

    def __init__(self, args: Sequence[Any], device: torch.device) -> None:
        self._copies, self._device = [_twin(arg) for arg in args], device
        self._numbers = _random_numbers(device)

    def difference(self, run: Run, found: Sequence[Any]) -> float:
        """Runs the code, and returns the largest difference. `found`: what the graph returned, and its arguments."""
        now = _random_numbers(self._device)
        _restart(self._device, self._numbers)
        wanted = [*run(list(self._copies)), *self._copies]
        _restart(self._device, now)
        return max((_apart(*pair) for pair in zip(found, wanted, strict=True)), default=0.0)


def _twin(arg: Any) -> Any:
    """A copy of an argument, with its strides; without memory if it has none."""
    if not isinstance(arg, Tensor):
        return arg
    made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    if arg.numel() and not arg.untyped_storage().nbytes():
        made.untyped_storage().resize_(0)
    elif (part := distinct(arg)) is None:
        return arg.detach().clone()
    else:
        part_of(made, part).copy_(part_of(arg, part).detach())
    return made


def _apart(one: Any, other: Any) -> float:
    """The largest difference between two tensors; NaN is no difference to NaN."""
    if not isinstance(one, Tensor) or not one.numel():
        return 0.0
    differs = (one != other) & ~((one != one) & (other != other))
    found = (one.detach().double() - other.detach().double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(torch.where(differs, found, 0.0).max())


def _random_numbers(device: torch.device) -> Tensor:
    """The state of the device's generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _restart(device: torch.device, state: Tensor) -> None:
    """The device's generator continues from `state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
