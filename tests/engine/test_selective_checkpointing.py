"""Selective activation checkpointing: which operations run again is for the program's policy to say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zeroweave as zw
from tests.support.marks import MODES, daily

aten = torch.ops.aten
Policy = Callable[..., CheckpointPolicy]
Step = Callable[[Tensor], Tensor]


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def all_but_cheap(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Views of parameters are among what is kept."""
    return CheckpointPolicy.PREFER_RECOMPUTE if op is aten.tanh.default else CheckpointPolicy.MUST_SAVE


POLICIES: dict[str, Policy] = {"products": products, "all but cheap": all_but_cheap}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.blocks, self.ran = nn.ModuleList(Block() for _ in range(3)), 0
        self._contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self._contexts)
        return x.square().mean()


def train(policy: Policy, step: Callable[[nn.Module, torch.optim.Optimizer], Step]) -> list[float]:
    torch.manual_seed(0)
    model = Net(policy)
    one = step(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    return [float(one(batch)) for batch in batches]


def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def one(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return one


@daily(
    ("stage", "mode", "policy"),
    [(3, "eager", "products"), (2, "aot_eager", "products")],
    [
        *((3, mode, "all but cheap") for mode in MODES),
        *((stage, "eager", "products") for stage in (1, 2)),
        *((stage, "aot_eager", "products") for stage in (1, 3)),
    ],
)
def test_a_policy_changes_no_bit(stage: int, mode: str, policy: str) -> None:
    def engine(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        made = zw.initialize(model, optimizer, {"stage": stage, "compile": MODES[mode]})
        return lambda batch: made.train_step((batch,), lambda loss, _: loss)

    assert train(POLICIES[policy], engine) == train(POLICIES[policy], alone)


def test_a_policy_is_not_asked_about_what_the_engine_does() -> None:
    ran: list[Any] = []

    def noted(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ran.append(op)
        return products(context, op)

    def engine(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        made = zw.initialize(model, optimizer, {"stage": 3, "compile": {"enabled": False}})
        return lambda batch: made.train_step((batch,), lambda loss, _: loss)

    train(noted, engine)
    assert aten.addmm.default in ran
    assert not {aten.split_with_sizes.default, aten.empty.memory_format} & {*ran}  # these are the engine's
