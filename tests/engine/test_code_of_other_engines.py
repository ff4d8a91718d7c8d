"""Code that Dynamo keeps for all engines: where it hands that of one to another, both train as ever."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.marks import daily

STEPS = 3


def block_class(name: str) -> type[nn.Module]:
    """Blocks whose forward has a code object of its own, which is compiled anew for each number that it reads."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.up = number, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.up(x)) * (self.number * 0.1)

    code = Block.forward.__code__.replace(co_name=f"forward_{name}")
    Block.forward = types.FunctionType(code, globals())  # type: ignore[method-assign]
    return Block


def blocks(kind: type[nn.Module], seed: int, hooked: bool) -> nn.Sequential:
    """`hooked`: with hooks that break the graph, so that Dynamo compiles the forward as a frame of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(kind(number) for number in range(1, 7)))
    for block in model if hooked else ():
        block.register_full_backward_hook(lambda module, before, behind: None)
    return model


def train(call: Any, backward: Any, step: Any) -> list[float]:
    losses = []
    for seed in range(STEPS):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        loss = call(x).square().mean()
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(model, torch.Tensor.backward, step)


def engine_of(model: nn.Module, limit: int) -> Any:
    config = {"stage": 3, "compile": {"lower": "aot_eager", "recompile_limit": limit}}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


@daily("first", ["was destroyed"], ["trains on", "is gone"])
def test_an_engine_past_its_limit_runs_code_of_another(first: str) -> None:
    kind = block_class(first.replace(" ", "_"))
    one = engine_of(blocks(kind, 1, hooked=True), limit=16)
    assert train(one, one.backward, one.step) == plain(blocks(kind, 1, hooked=False))
    if first != "trains on":
        one.destroy()
    if first == "is gone":
        del one
        gc.collect()
    other = engine_of(blocks(kind, 2, hooked=False), limit=2)
    before = one.stats.compiled_calls if first == "trains on" else 0
    assert train(other, other.backward, other.step) == plain(blocks(kind, 2, hooked=False))
    assert other.stats.eager_regions and other.stats.compiled_calls
    if first == "trains on":
        assert one.stats.compiled_calls == before, "what another engine runs is none of its calls"
        train(one, one.backward, one.step)
        assert one.stats.compiled_calls > before
        one.destroy()
    other.destroy()
