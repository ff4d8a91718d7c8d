"""An optimizer whose steps a CUDA graph can hold: learning rates, skip flag and step counts live on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from zeroweave.optim.lion import Lion
from zeroweave.optim.several import kind_of, members_of

_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those whose fused steps read learning rate and skip flag from the device."""


def why_not_captured(optimizer: torch.optim.Optimizer, looks: bool) -> str | None:
    """Why no graph can hold the optimizer's steps; None where one can.

    `looks`: are steps skipped whose gradients are not finite?
    """
    name, groups = kind_of(optimizer), optimizer.param_groups
    if len(members_of(optimizer)) > 1:
        return f"{name} are several optimizers: make it one with several groups"
    if type(optimizer) is Lion:
        return None  # its steps are as the fused ones
    if type(optimizer) in _FUSED and all(group.get("fused") for group in groups):
        return None
    if not all(group.get("capturable") for group in groups):
        how = "fused=True" if type(optimizer) in _FUSED else "capturable=True, if it has that"
        return f"{name} decides parts of its step on the host: make it with {how}"
    if looks:
        return f"{name} cannot skip a step on the device, as float16 and on_nonfinite need it: make it with fused=True"
    return None


class Rates:
    """The learning rates of an optimizer's groups on the device, float32, 0-dim, where its steps read them.

    All steps do, in a graph or not: so they compute the same, bit by bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        self._values: list[float | None] = [None] * len(self._tensors)
        self._found: torch.Tensor | None = None
        self._held = False

    @property
    def found(self) -> torch.Tensor | None:
        """1 where steps are to do nothing, inside of `holding`; float32, 0-dim."""
        return self._found

    def of(self, group: int) -> torch.Tensor:
        """The learning rate of a group."""
        return self._tensors[group]

    def take(self) -> None:
        """The next step uses the rates that the groups have now."""
        if self._held:
            return
        for index, (tensor, group) in enumerate(zip(self._tensors, self._optimizer.param_groups, strict=True)):
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                tensor.copy_(rate)
                self._values[index] = None
            elif rate != self._values[index]:
                self._values[index] = rate
                tensor.fill_(rate)

    @contextmanager
    def holding(self, found: torch.Tensor | None) -> Iterator[None]:
        """Inside, steps use the rates of the last `take`, and do nothing where `found` is 1: as a graph holds them."""
        self._held, self._found = True, found
        try:
            yield
        finally:
            self._held, self._found = False, None

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Inside, the optimizer's groups have the tensors."""
        optimizer, found = self._optimizer, self._found
        kept = [(group, group["lr"], group.get("capturable")) for group in optimizer.param_groups]
        for group, tensor in zip(optimizer.param_groups, self._tensors, strict=True):
            group["lr"] = tensor
            if self._held and "capturable" in group:
                group["capturable"] = True  # torch asks for it inside of a capture; a fused step is
        if found is not None:
            optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for group, rate, capturable in kept:
                group["lr"] = rate
                if capturable is not None:
                    group["capturable"] = capturable
            if found is not None:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
