"""What a model of the zoo is: how to build it, feed it and run one micro-step of it.

The same functions serve the engine and the unsharded reference: `call` is the engine or the bare model, `module`
the model's own object (`engine.module`), `backward` is `engine.backward` or the reference's division by the
accumulation count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
ROWS = 4
VOCABULARY = 32


class Backward(Protocol):
    def __call__(self, loss: Tensor, retain_graph: bool = False) -> None: ...


Micro = Callable[[Callable[..., Any], nn.Module, Any, Backward], Tensor]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    `build()` runs under a seed set by the caller. `batch(rank, index)` gives a rank's data for the micro-step
    `index`, counted over the whole run. `micro` runs forward and backward and returns the loss. `compiles`: some
    region of it can be compiled. `eager_regions`: the regions that Dynamo must give up on. `steady`: every step
    has the same calls. `stages`: at which it can be exact. `config` is added to the engine's.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    micro: Micro
    compiles: bool = True
    eager_regions: frozenset[str] = frozenset()
    steady: bool = True
    stages: tuple[int, ...] = (1, 2, 3)
    config: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05


def generator(rank: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_003 * rank + index + 1)


def rows(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of shape [ROWS, WIDTH], fp32."""
    random = generator(rank, index)
    return torch.randn(ROWS, WIDTH, generator=random), torch.randn(ROWS, WIDTH, generator=random)


def sequences(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of shape [2, 6, WIDTH], fp32."""
    random = generator(rank, index)
    return torch.randn(2, 6, WIDTH, generator=random), torch.randn(2, 6, WIDTH, generator=random)


def tokens(rank: int, index: int, length: int = 8) -> Tensor:
    """Token ids of shape [2, length + 1], int64."""
    return torch.randint(VOCABULARY, (2, length + 1), generator=generator(rank, index))


def uneven_tokens(rank: int, index: int) -> Tensor:
    """Token ids whose length differs between ranks and between steps."""
    return tokens(rank, index, 5 + 3 * rank + index % 2)


def images(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Images of shape [ROWS, 3, 8, 8] and targets of shape [ROWS, WIDTH], fp32."""
    random = generator(rank, index)
    return torch.randn(ROWS, 3, 8, 8, generator=random), torch.randn(ROWS, WIDTH, generator=random)


def regression(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    loss = F.mse_loss(call(x).to(y.dtype), y)  # which PyTorch 2.11 does not do by itself in the backward
    backward(loss)
    return loss.detach()


def next_token(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    logits = call(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    backward(loss)
    return loss.detach()


def huggingface(call: Callable[..., Any], module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    loss = call(input_ids=batch, labels=batch).loss
    backward(loss)
    return loss.detach()


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """An input layer, blocks, an output layer; each odd model replaces one of them."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block(index) for index in range(depth)])
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def stack_of(block: Callable[[], nn.Module], depth: int = 4) -> Callable[[], nn.Module]:
    return lambda: Stack(lambda index: block(), depth)
