"""The kernels of updates as plans have them: they compute nothing, and take the time of what they read and write.

That of compact states takes the time of its arithmetic where that is longer, as it is on GPUs that were measured.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroweave.plan.hardware import Hardware
from zeroweave.plan.meter import PlannedClock


class PlannedKernel:
    """One of them. Launched as Triton's are: `kernel[grid](tensors and numbers, by=name)`."""

    def __init__(self, clock: PlannedClock, hardware: Hardware, codes: bool = False) -> None:
        self._clock, self._hardware, self._codes = clock, hardware, codes

    def __getitem__(self, grid: tuple[int]) -> PlannedKernel:
        return self

    def __call__(
        self, master: torch.Tensor, remainder: torch.Tensor, gradient: torch.Tensor, *more: Any, **by: Any
    ) -> None:
        """Reads all of it, each tensor once, and writes all but the gradient."""
        state = {id(tensor): tensor for tensor in (master, remainder, *more) if isinstance(tensor, torch.Tensor)}
        state.pop(id(gradient), None)  # it stands in for what is not there
        nbytes = gradient.nbytes + 2 * sum(tensor.nbytes for tensor in state.values())
        if self._codes:
            self._clock.spend(self._hardware.coded(gradient.numel(), nbytes))
        else:
            self._clock.spend(self._hardware.compute(0.0, nbytes, gradient.itemsize))


class PlannedKernels:
    """In the place of `_triton.rules`."""

    BLOCK = 1

    def __init__(self, clock: PlannedClock, hardware: Hardware) -> None:
        self.adagrad = self.adam = self.lion = self.sgd = PlannedKernel(clock, hardware)
        self.compact_adam = PlannedKernel(clock, hardware, codes=True)

    def programs(self, numel: int) -> tuple[int]:
        return (numel,)
