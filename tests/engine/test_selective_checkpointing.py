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


class Viewing(Block):
    """With several views of one shape: one operation too many would take the place of another one."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x.view(8, 4).view(4, 8)).view(4, 16))
        h = torch.tanh(self.down(h).view(4, 8))
        return (h * h).sin().view(4, 8)


class Net(nn.Module):
    def __init__(self, policy: Policy, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self._contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self._contexts)
        return x.square().mean()


def train(
    policy: Policy, step: Callable[[nn.Module, torch.optim.Optimizer], Step], block: type[Block] = Block
) -> list[float]:
    torch.manual_seed(0)
    model = Net(policy, block)
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


@daily(
    ("stage", "policy", "clips"),
    [(3, "all but cheap", False), (2, "products", True)],
    [(1, "all but cheap", False), (2, "all but cheap", False), (3, "products", True)],
)
def test_a_recomputation_may_be_the_first_sign_of_a_backward(stage: int, policy: str, clips: bool) -> None:
    """`loss.backward()` by the program, whose last operation is in a checkpoint; `clips`: in front of it."""

    def engine(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> Step:
        config = {"stage": stage, "compile": {"enabled": False}, "gradient_accumulation_steps": 1 + clips}
        made = zw.initialize(model, optimizer, config)

        def one(batch: Tensor) -> Tensor:
            for _ in range(1 + clips):
                loss: Tensor = made(batch)
                if plain:
                    made.scale(loss).backward()
                else:
                    made.backward(loss)
                if clips:
                    made.clip_grad_norm_(1e-3)
                made.step()
            return loss.detach()

        return one

    for block in (Block, Viewing):
        told, plain = (train(POLICIES[policy], partial(engine, plain=plain), block) for plain in (False, True))
        assert told == plain
        if not clips:
            assert plain == train(POLICIES[policy], alone, block)


def test_gradients_of_inputs_by_themselves() -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Net(products)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        of: Any = zw.initialize(model, optimizer, {"stage": 3, "compile": {"enabled": False}}) if wrapped else model
        x = torch.randn(4, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
        found.append(torch.autograd.grad(of(x), x)[0])
    assert torch.equal(*found)


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
