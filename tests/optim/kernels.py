"""A double of the kernel that updates compact states: the same arguments, in operations of torch, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroweave.comm.rounding import join_, noise_, split_
from zeroweave.optim.quantize8 import BLOCK, Coded, decode, encode_


class Kernels:
    """Instead of `_triton.rules`. It has no other kernels than that of compact Adam."""

    BLOCK = 1
    adagrad = adam = lion = sgd = None

    def __init__(self) -> None:
        self.compact_adam = self
        self.launches = 0
        self.broken = -1
        """the launch that fails"""

    def programs(self, numel: int) -> tuple[int]:
        return (numel,)

    def __getitem__(self, grid: tuple[int]) -> Kernels:
        return self

    def __call__(
        self, source: Tensor, rest: Tensor, gradient: Tensor, first: Tensor, second: Tensor, first_scales: Tensor,
        second_scales: Tensor, factor: Tensor, numel: int, keep: float, size: float, root: float,
        decay: float, more1: float, beta2: float, more2: float, eps: float, position: int, step: int, **by: Any,
    ) -> None:  # fmt: skip
        self.launches += 1
        if self.launches - 1 == self.broken:
            raise RuntimeError("broken kernel")
        assert by["SPLIT"] and not (by["FACTOR"] or by["COUPLED"] or by["MAXIMIZE"])
        noise = noise_(torch.empty(numel, dtype=torch.int32), position, step)
        noise = torch.cat([noise, noise.new_zeros(-numel % BLOCK)])
        moments = [(first, first_scales), (second, second_scales)]
        mean, square = (decode(_whole(*each))[:numel] for each in moments)
        mean.lerp_(gradient, more1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=more2)
        master = join_(torch.empty(numel), source, rest).mul_(keep)
        master.addcdiv_(mean, square.sqrt().div_(root).add_(eps), value=-size)
        split_(master, source, rest, noise[:numel])
        for (codes, scales), values in zip(moments, (mean, square), strict=True):
            coded = _whole(codes, scales)
            encode_(coded, torch.cat([values, values.new_zeros(-numel % BLOCK)]), noise)
            codes.copy_(coded.codes[:numel])
            scales.copy_(coded.scales)


def _whole(codes: Tensor, scales: Tensor) -> Coded:
    """A copy that ends with a block."""
    return Coded(torch.cat([codes, codes.new_zeros(-codes.numel() % BLOCK)]), scales.clone())
