"""Windows whose backwards add up before they are reduced: matmuls add to the local sums, and to nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import zeroweave as zw
from tests.support.marks import STAGES, daily
from tests.support.twins import Net, learn, loss_of, rows, twins

MATRICES = 6
"""Weights of the compiled blocks: each is the operand of one matmul."""


def block_of(engine: Any, kind: str, last: bool) -> AbstractContextManager[None]:
    return engine.no_sync() if kind == "no_sync" and not last else nullcontext()


@STAGES
@daily("kind", ["coalesced", "no_sync"], ["plain"])
def test_matmuls_add_to_local_sums(stage: int, kind: str) -> None:
    count = 3
    with twins(stage, "aot_eager") as both:
        for _ in range(2):
            before = both.engine.stats.written_gradients
            with both.engine.coalesce_grad_reduction() if kind == "coalesced" else nullcontext():
                for index in range(count):
                    if kind != "coalesced":
                        both.engine.set_gradient_accumulation_boundary(index == count - 1)
                    with block_of(both.engine, kind, index == count - 1):
                        both.engine.backward(loss_of(both.engine, index))
            both.plain.each(lambda net: [learn(net, index) for index in range(count)])
            both.assert_equal_gradients()
            # At stages 2 and 3 each backward of a plain window reduces, and writes into the flat.
            assert both.engine.stats.written_gradients - before == MATRICES * count
            both.step()
        both.assert_equal_values()
        both.assert_still_trains()


@STAGES
def test_gradients_for_somebody_else_are_not_added(stage: int) -> None:
    """They are computed by the same code, in the middle of a window."""
    with twins(stage, "aot_eager") as both:

        def others(call: Any) -> torch.Tensor:
            x = rows(5).requires_grad_()
            loss = call(x).pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward(inputs=[x])
            assert x.grad is not None and torch.equal(x.grad, gradient)
            return gradient

        with both.engine.coalesce_grad_reduction():
            both.engine.backward(loss_of(both.engine, 0))
            first = others(both.engine)
            both.engine.backward(loss_of(both.engine, 1))
            assert torch.equal(others(both.engine), first)
        both.plain.each(lambda net: [learn(net, index) for index in range(2)])
        both.assert_equal_gradients()


@STAGES
def test_what_was_added_goes_with_the_window(stage: int) -> None:
    with twins(stage, "aot_eager") as both:
        for gives_up in (True, False):
            with both.engine.no_sync():
                both.engine.backward(loss_of(both.engine, 3 * gives_up))
            if gives_up:
                both.engine.zero_grad()
        both.engine.backward(loss_of(both.engine, 1))
        both.plain.each(lambda net: [learn(net, index) for index in range(2)])
        both.assert_equal_gradients()


@daily(("params", "sums"), [("bfloat16", "float32")], [("bfloat16", "bfloat16"), ("float16", "float32")])
@STAGES
def test_sums_have_the_dtype_that_was_asked_for(stage: int, params: str, sums: str) -> None:
    """On the CPU a gradient is rounded before it is added to a wider sum: eager code has the same bits."""

    def gradients(compiled: bool) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(0)
        model: nn.Module = Net()
        config = {
            "stage": stage,
            "precision": {"params": params, "accumulate": sums},
            "compile": {"lower": "aot_eager"} if compiled else {"enabled": False},
        }
        with zw.initialize(model, torch.optim.SGD(model.parameters(), 0.1), config) as engine:
            with engine.coalesce_grad_reduction():
                for index in range(3):
                    engine.backward(engine(rows(index)).float().pow(2).mean())
            size = torch.finfo(getattr(torch, sums)).bits // 8
            assert engine.stats.memory.local_sums == size * sum(bucket.numel for bucket in engine.buckets)
            return engine.gradients(), engine.stats.written_gradients

    (eager, _), (compiled, written) = gradients(False), gradients(True)
    assert written == 3 * MATRICES
    for name, gradient in eager.items():
        eps = torch.finfo(getattr(torch, params)).eps
        torch.testing.assert_close(compiled[name], gradient, rtol=0.0, atol=4 * eps * float(gradient.abs().max()))


class Reading(nn.Module):
    """Asks blocks for the dtype of a weight, outside of them. No matmul adds a convolution's gradient to the sums."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(count))
        self.waiting: list[int] = []
        self.engine: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            weight = block[0].weight
            assert isinstance(weight, torch.Tensor)
            x = block(x.to(weight.dtype))
            x.register_hook(lambda gradient: self.look())
        return x

    def look(self) -> None:
        """How many gradients are in no sum, as a backward comes from one block to the next."""
        accounts = self.engine._context.runtime.gradients.accounts
        self.waiting.append(sum(len(account.parts) for account in accounts.values()))


@STAGES
def test_gradients_of_blocks_that_are_read_outside_of_them_are_added_up_at_once(stage: int) -> None:
    model = Reading(4)
    config = {"stage": stage, "compile": {"lower": "aot_eager"}, "gradient_accumulation_steps": 2}
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        model.engine = engine
        for index in range(4):
            with block_of(engine, "no_sync", index % 2 == 1):
                model.waiting.clear()
                engine.backward(engine(torch.ones(2, 4, 8)).square().mean())
                if index == 2:
                    assert model.waiting == [0, 0, 0, 0]
            engine.step()
