"""A view of a whole parameter that code above a graph break makes, and compiled code below saves for its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.reference import Plain, judge
from tests.support.zoo import WIDTH, rows


class Grouped(nn.Module):
    """Its weight, shaped or transposed, is used in groups."""

    def __init__(self, shaped: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.shaped = shaped

    def forward(self, x: Tensor) -> Tensor:
        weight = self.shaped(self.weight)
        torch._dynamo.graph_break()
        return x + torch.tanh(torch.einsum("bi,gio->bgo", self.norm(x), weight).flatten(1))


def in_rows(weight: Tensor) -> Tensor:
    return weight.view(WIDTH, 2, WIDTH // 2).transpose(0, 1)


def in_columns(weight: Tensor) -> Tensor:
    return weight.view(2, WIDTH // 2, WIDTH).permute(0, 2, 1)


@pytest.mark.parametrize("shaped", [in_rows, in_columns])
def test_a_view_that_is_saved_keeps_its_shape(shaped: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    plain = Plain(nn.Sequential(*(Grouped(shaped) for _ in range(3))))
    model = copy.deepcopy(plain.nets[0])
    x, y = rows(0, 0)
    plain.each(lambda net, x, y: (net(x) - y).square().mean().backward(), x, y)
    config = {"stage": 3, "compile": {"lower": "aot_eager"}}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), 0.1), config) as engine:
        engine.backward((engine(x) - y).square().mean())
        used, told = judge(engine.gradients(), plain.gradients())
        assert used <= 1 and engine.stats.compiled_calls > 6, told
        engine.step()
