"""Weights that are quantized to 8 bits, as other libraries have them: parameters of a class of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Coarse(nn.Parameter):
    """8-bit integers, and a scale for each row, which is an attribute."""

    scale: Tensor

    def __new__(cls, values: Tensor, scale: Tensor) -> Coarse:
        made = torch.Tensor._make_subclass(cls, values, False)
        made.scale = scale
        return made

    def to(self, *args: Any, **kwargs: Any) -> Coarse:
        return Coarse(self.data.to(*args, **kwargs), self.scale.to(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Coarse:
        return Coarse(self.data.clone(), self.scale.clone())

    def whole(self) -> Tensor:
        return self.data.float() * self.scale


class CoarseLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = Coarse((self.weight.detach() / scale).round().to(torch.int8), scale)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.whole(), self.bias)


class Adapted(nn.Module):
    """A coarse layer below a low-rank change of it that trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = CoarseLinear(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(width: int = 8) -> nn.Sequential:
    """Three such blocks, and a coarse head that lies outside of all regions and is tied to the last block's layer."""
    torch.manual_seed(2)
    model = nn.Sequential(*(Adapted(width) for _ in range(3)), CoarseLinear(width, width))
    model[3].weight = model[2].base.weight
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
