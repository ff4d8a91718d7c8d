"""The debug switches: they change no result, and a wrong order is found in the backward in which it happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zeroweave as zw
from tests.support.dc_world import World
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.zoo import Block, Stack, rows
from zeroweave.comm.wrappers import Fenced

SWITCHES = dict.fromkeys(
    ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather", "check_every_step"),
    True,
)


def started(stage: int, gas: int, debug: dict[str, bool], **settings: Any) -> zw.Engine:
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = {"stage": stage, "compile": {"enabled": False}, "gradient_accumulation_steps": gas, "debug": debug}
    return zw.initialize(module, optimizer, {**config, "deadline_seconds": 200.0, **settings})


def train(stage: int, debug: dict[str, bool]) -> tuple[dict[str, Tensor], list[dict[str, Tensor | None]], Any, bool]:
    """Parameters, gradients and traffic of three steps, and whether there was a fence."""
    with started(stage, 2, debug, gradient_clipping=0.5) as engine:
        gradients = []
        for index in range(6):
            x, y = rows(engine.rank, index)
            engine.backward(F.mse_loss(engine(x), y))
            if engine.is_gradient_accumulation_boundary():
                gradients.append(engine.gradients())
            engine.step()
        with engine.full_parameters() as parameters:
            values = {name: p.detach().clone() for name, p in parameters.items()}
        return values, gradients, engine.stats.total, isinstance(engine._context.transport._inner, Fenced)


@pytest.mark.matrix
@pytest.mark.parametrize("switches", [SWITCHES, {"keep_gradient_targets": True}], ids=["all", "kept"])
@daily("stage", [3], [1, 2])
def test_switches_change_nothing(pools: Pools, stage: int, switches: dict[str, bool]) -> None:
    with_them, without = pools(2).run(train, stage, switches), pools(2).run(train, stage, {})
    for (values, gradients, traffic, fenced), (others, other_gradients, other_traffic, other_fenced) in zip(
        with_them, without, strict=True
    ):
        assert fenced == (switches is SWITCHES) and not other_fenced
        assert values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)
        for here, there in zip(gradients, other_gradients, strict=True):
            for name, gradient in here.items():
                other = there[name]
                assert gradient is not None and other is not None and torch.equal(gradient, other)
        assert traffic == other_traffic


def by_name(stage: int, held: str) -> float:
    with World(stage, held, SWITCHES) as world:
        worst = 0.0
        for step in range(2):
            for micro in range(3):
                world.micro_step(3 * step + micro, update=micro == 2)
            worst = max(worst, world.difference())
        return worst


@daily(("stage", "held"), [(2, "whole")], [(1, "cut"), (3, "cut")])
def test_all_switches_change_nothing_by_name(pools: Pools, stage: int, held: str) -> None:
    assert max(pools(2).run(by_name, stage, held)) <= 1


def depart() -> None:
    """Before its third backward of four rank 1 gathers two equal blocks in another order than rank 0."""
    engine = started(3, 4, {"check_every_step": True})
    for micro in range(4):
        x, y = rows(dist.get_rank(), micro)
        loss = F.mse_loss(engine(x), y)
        if micro == 2:
            with torch.no_grad():
                for index in (1, 2) if dist.get_rank() == 0 else (2, 1):
                    engine.module.blocks[index](x)  # as many collectives, of the same size
        engine.backward(loss)
        engine.step()


def test_another_order_is_found_where_it_begins(disposable: Pools) -> None:
    """On the CPU at stage 3, before anything is sent; what the check after a backward compares, `Agreements` tests."""
    outcomes = disposable(2).outcomes(depart)
    described = "\n".join(outcome.describe() + outcome.message for outcome in outcomes)
    assert all(outcome.failed for outcome in outcomes), described
    for name in ("blocks.1", "blocks.2"):
        assert f"having entered {name}: all_gather {name}" in described, described


def another_number_of_backwards() -> None:
    """Rank 0 has a second backward, without any collective, while rank 1 is at its step."""
    engine = started(2, 1, {"check_every_step": True})
    x, y = rows(dist.get_rank(), 0)
    engine.backward(F.mse_loss(engine(x), y))
    if dist.get_rank() == 0:
        with engine.no_sync():
            engine.backward(F.mse_loss(engine(x), y))
    engine.step()


def test_a_check_never_pairs_up_with_the_agreement_of_a_step(disposable: Pools) -> None:
    for outcome in disposable(2).outcomes(another_number_of_backwards, deadline=40.0):
        assert outcome.kind == "AgreementError", outcome.describe()
        assert "rank 0 at 'the check after backward 2 of step 0', rank 1 at 'agreement of step 0'" in outcome.message
