"""Models that hold or hand on their parameters in ways of their own, all of which train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import ROWS, WIDTH, Backward, Block, Entry, Stack, regression, rows

Call = Callable[..., Any]


class Lists(nn.Module):
    """Weights in a ParameterList, scales in a ParameterDict, and parameters of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3)])
        self.scales = nn.ParameterDict({"in": nn.Parameter(torch.ones(WIDTH)), "out": nn.Parameter(torch.ones(WIDTH))})
        self.factor, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scales["in"]
        for weight in self.weights:
            h = h + self.factor * torch.tanh(h @ weight)
        return h * self.scales["out"] + self.nothing.sum()


@dataclass
class Batch:
    x: Tensor
    scale: float


@dataclass
class Output:
    hidden: Tensor
    kept: list[Tensor]


class Records(Stack):
    """Dataclasses go in and come out."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())

    def forward(self, batch: Batch) -> Output:  # type: ignore[override]
        h, kept = self.enter(batch.x * batch.scale), []
        for block in self.blocks:
            h = block(h)
            kept.append(h.mean())
        return Output(self.leave(h), kept)


def with_records(call: Call, module: nn.Module, batch: Any, backward: Backward) -> Tensor:
    x, y = batch
    output = call(Batch(x, 0.5))
    loss = F.mse_loss(output.hidden, y) + 0.1 * torch.stack(output.kept).square().sum()
    backward(loss)
    return loss.detach()


class Thrice(nn.Module):
    """One block stands three times in a list."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block, block, Block(), block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stages(Stack):
    """A generator gives the hidden states one by one."""

    def __init__(self) -> None:
        super().__init__(lambda index: Block())

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.stack(list(self.hidden(x))).mean(0))


class Delegating(nn.Module):
    """A wrapper that answers for what it does not have by what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(lambda index: Block())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


def uneven_rows(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Another number of rows on each rank and in each micro-step."""
    x, y = rows(rank, index)
    count = 1 + (rank + index) % ROWS
    return x[:count], y[:count]


SHAPED_MODELS = (
    Entry("parameter_lists", Lists, rows, regression),
    Entry("dataclasses", Records, rows, with_records),
    Entry("block_three_times", Thrice, rows, regression),
    Entry("generator", Stages, rows, regression),
    Entry("delegating_wrapper", Delegating, rows, regression),
    Entry("uneven_rows", lambda: Stack(lambda index: Block()), uneven_rows, regression),
)
