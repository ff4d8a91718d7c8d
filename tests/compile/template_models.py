"""Blocks and models whose templates have something of their own: ties, heads, breaks, branches, writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.comparing import WIDTH, Block


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(self.up(self.norm(x)), 0.25, self.training)), 0.5, self.training)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.inner.weight.sum(), 0.5, self.training)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, WIDTH), nn.Embedding(7, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Adding(nn.Module):
    """The gradient of both parameters and of the input is one tensor: the output's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.one, self.two = (nn.Parameter(torch.randn(5, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.two


class TwoHeads(nn.Module):
    """Two parameters whose gradient is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, 6, bias=False)
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.first.weight + self.second.weight))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv.weight.chunk(3)
        return x + self.out(F.linear(x, q) * torch.sigmoid(F.linear(x, k)) + F.linear(x, v) + self.qkv.bias[:1])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


class Transposed(nn.Module):
    """`x @ w` has its gradient transposed in some formulations, `w.t()` certainly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.one, self.two = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.one) @ self.two.t() * self.inner.weight + self.one.t()[:5]


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.norm(x))[:, :WIDTH]
        torch._dynamo.graph_break()
        return x + self.down(torch.cat([x, x], -1))


class Mixed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.double()).float())))


class Inside(Block):
    def forward(self, x: Tensor) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            return self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))

        return x + checkpoint(mlp, self.norm(x), use_reentrant=False)


class Conditional(Block):
    """One parameter is read in the branches; two parameters of a bucket share storage, which cond refuses."""

    def __init__(self, read: int = 1) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.up.weight, self.up.bias
        branch = (lambda t: t @ one.t()) if self.read == 1 else (lambda t: F.linear(t, one, two))
        return x + self.down(torch.cond(x.sum() > 0, branch, lambda t: torch.sin(branch(t)), (self.norm(x),)))


class Shares(nn.Module):
    """A view of a parameter and a fresh output, both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner.weight


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)
