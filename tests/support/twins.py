"""One model under an engine and the same one in plain PyTorch, in a world of any size."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import MODES, daily
from tests.support.reference import Expected, Plain, judge

WIDTH = 8
SOME = daily(("stage", "mode"), [(2, "aot_eager"), (3, "eager")], [(1, "eager"), (3, "aot_eager")])
GATHERED = daily(
    ("stage", "gather", "mode"),
    [(1, True, "eager"), (3, False, "aot_eager")],
    [(2, True, "aot_eager"), (1, False, "aot_eager"), (2, False, "eager"), (3, False, "eager")],
)
MODE = pytest.mark.parametrize("mode", list(MODES))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """An eager first and last layer around three equal blocks, which are compiled where anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.leave = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.hidden(x))


class Multiplying(Net):
    """The product saves the parameter itself for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) * self.enter.weight[0].sum() * self.leave.bias + self.leave(x)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rows(index: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index + 1 + 1000 * rank()))


def loss_of(call: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    return call(rows(index)).pow(2).mean()


def learn(call: Callable[[Tensor], Tensor], index: int = 0) -> None:
    loss_of(call, index).backward()


def penalty(parameters: Iterable[Tensor]) -> Tensor:
    return 0.1 * torch.stack([p.pow(2).sum() for p in parameters]).sum()


def values_of(engine: Any) -> dict[str, Tensor]:
    """Copies of the engine's full values by name."""
    with engine.full_parameters() as full:
        return {name: parameter.detach().clone() for name, parameter in full.items()}


@dataclass
class Twins:
    """One model under an engine and the same one in plain PyTorch, both under SGD; of several ranks, collective."""

    engine: Any
    plain: Plain

    def step(self) -> None:
        self.engine.step()
        if self.engine.was_step_applied():
            self.expected_gradients()
            self.plain.step()

    def expected_gradients(self) -> Expected:
        """Those of plain PyTorch; of several ranks their means, which take their place."""
        return self.plain.average() if self.engine.world > 1 else self.plain.gradients()

    def assert_equal_gradients(self) -> None:
        found = judge(self.engine.gradients(), self.expected_gradients())
        assert found[0] <= 1, found

    def assert_equal_values(self) -> None:
        found = judge(values_of(self.engine), self.plain.values())
        assert found[0] <= 1, found

    def assert_equal_outputs(self) -> None:
        """Of a forward now."""
        outputs = self.plain.each(lambda net: {"output": net(rows()).detach()})
        found = judge({"output": self.engine(rows()).detach()}, Expected(*outputs))
        assert found[0] <= 1, found

    def assert_still_trains(self) -> None:
        """An ordinary step from here on is PyTorch's."""
        self.engine.backward(loss_of(self.engine, 77))
        self.plain.each(learn, 77)
        self.assert_equal_gradients()
        self.step()
        self.assert_equal_values()


@contextlib.contextmanager
def twins(
    stage: int, mode: str, build: Callable[[], nn.Module] = Net, lr: float = 0.1, **settings: Any
) -> Iterator[Twins]:
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    if rank():  # the engine takes the values of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    config = {"stage": stage, "compile": MODES[mode], **settings}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr), config) as engine:
        yield Twins(engine, Plain(plain, lambda parameters: torch.optim.SGD(parameters, lr)))
        if mode != "eager" and engine.global_steps:
            assert engine.stats.compiled_calls > 0, "the compiled path was not taken"
