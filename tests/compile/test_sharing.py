"""Which blocks share a template: those with equal code and equal values that it reads, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.compile.comparing import WIDTH, agree, compare, rows
from tests.compile.fakes import FakeHost
from tests.support.marks import slow
from tests.support.reference import Expected, Plain
from zeroweave.compile.regions import region_key

pytestmark = pytest.mark.oldest
both = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])
Function = Callable[..., Any]


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Choosing(Linears):
    """`torch.cond` with a body of its own."""

    def __init__(self, body: Function) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.cond(x.sum() > 0, self.body, torch.sin, (self.up(x),)))


def power(exponent: int) -> Function:
    return lambda t: torch.tanh(t) ** exponent


class Attending(Linears):
    """`flex_attention` with bodies of its own; x is [batch, length, WIDTH]."""

    def __init__(self, score_mod: Function | None = None, mask_mod: Function | None = None) -> None:
        super().__init__()
        self.score_mod = score_mod
        self.mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, 128, 128, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        mixed = flex_attention(heads, heads, heads, score_mod=self.score_mod, block_mask=self.mask)
        return x + self.down(mixed.transpose(1, 2).flatten(2))


def distance(slope: int) -> Function:
    return lambda score, batch, head, query, key: score - slope * (query - key).abs()


def squared(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score * score


def window(size: int) -> Function:
    return lambda batch, head, query, key: (query - key).abs() < size


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Scaled(Linears):
    """Reads a constant of its own."""

    def __init__(self, constant: Any) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)) if self.constant == "gelu" else torch.tanh(self.up(x))
        return x + self.down(h) * (self.constant if isinstance(self.constant, int | float) else 1)


class Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


VARIANTS = {
    "cond bodies": ([lambda: Choosing(torch.cos), lambda: Choosing(torch.tanh)], 2),
    "cond closures": ([lambda: Choosing(power(2)), lambda: Choosing(power(3))], 2),
    "floats": ([lambda: Scaled(0.5), lambda: Scaled(0.25)], 2),
    "integers": ([lambda: Scaled(2), lambda: Scaled(3)], 2),
    "strings": ([lambda: Scaled("gelu"), lambda: Scaled("tanh")], 2),
}
ATTENTION = {
    "score_mod": ([lambda: Attending(distance(1)), lambda: Attending(squared), Attending], 3),
    "score_mod closures": ([lambda: Attending(distance(1)), lambda: Attending(distance(3))], 2),
    "mask_mod": ([lambda: Attending(None, window(9)), lambda: Attending(None, causal), Attending], 3),
    "mask_mod closures": ([lambda: Attending(None, window(9)), lambda: Attending(None, window(30))], 2),
}


def blocks_of(makes: Sequence[Function]) -> nn.Module:
    """Blocks of each kind, twice in turn."""
    blocks = [make() for make in (*makes, *makes)]
    assert len({region_key(block) for block in blocks}) == 1, "only Dynamo's guards can tell them apart"
    return Blocks(blocks)


@slow("cond bodies-aot_eager", "cond closures-aot_eager")
@both
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_block_reads_decides(name: str, lower: str) -> None:
    makes, count = VARIANTS[name]
    host = compare(blocks_of(makes), rows(), lower=lower)
    assert host.templates.graphs == count and host.ran == 4 * len(makes)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ATTENTION)
def test_bodies_of_attention_decide(name: str) -> None:
    """Forwards only, with PyTorch's own kernels: flex_attention has no backward on the CPU."""
    makes, count = ATTENTION[name]
    model = blocks_of(makes)
    x = torch.randn(2, 128, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        outputs = Plain(model).each(lambda net, x: {"output": net(x)}, x)
        host = FakeHost(model)
        agree({"output": model(x)}, Expected(*outputs))
    assert host.templates.graphs == count and host.ran == 2 * len(makes)


class Called(nn.Module):
    """Calls its equal blocks in different ways."""

    def __init__(self, block: Callable[[], nn.Module], ways: Sequence[Function]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in ways)
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        for layer, way in zip(self.layers, self.ways, strict=True):
            x = way(layer, x)
        return x


class Flexible(Linears):
    """Takes flags and other tensors; answers in the type and layout of x."""

    def forward(self, x: Tensor, other: Tensor | None = None, *, twice: bool = False, **more: Tensor) -> Tensor:
        h = self.up(x.float() if other is None else x.float() + other.float())
        for value in more.values():
            h = h * value
        h = self.down(torch.tanh(h))
        return x + (2 * h if twice else h).to(x.dtype)


def turned(layer: nn.Module, x: Tensor) -> Tensor:
    """The same values in another layout."""
    return layer(x.t().contiguous().t())


CALLS = {
    "strides": ([lambda f, x: f(x), turned], 2),
    "types": ([lambda f, x: f(x), lambda f, x: f(x.double()).float(), lambda f, x: f(x, x.double())], 3),
    "flags": ([lambda f, x: f(x), lambda f, x: f(x, twice=True)], 2),
    "keyword or not": ([lambda f, x: f(x, x.cos()), lambda f, x: f(x, other=x.cos())], 2),
    "other keywords": ([lambda f, x: f(x, a=x.cos()), lambda f, x: f(x, b=x.cos()), lambda f, x: f(x)], 3),
    "sizes": ([lambda f, x: f(x), lambda f, x: f(x.repeat(3, 1))[:5]], 2),
    "requires_grad": ([lambda f, x: f(x, x.cos()), lambda f, x: f(x, x.cos().detach())], 2),
}


@both
@pytest.mark.parametrize("name", CALLS)
def test_how_a_block_is_called_decides(name: str, lower: str) -> None:
    ways, count = CALLS[name]
    host = compare(Called(Flexible, [*ways, *ways]), rows(), lower=lower)
    assert host.templates.graphs == count and host.ran == 4 * len(ways)


def test_blocks_that_differ_in_nothing_they_read_share() -> None:
    blocks = [Scaled(1.0) for _ in range(4)]
    for index, block in enumerate(blocks):
        block.index = index
    host = compare(Blocks(blocks), rows())
    assert host.templates.graphs == 1
