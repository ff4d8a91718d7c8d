"""Ctrl-C at any point of a call: what a gather still writes is nobody else's memory, and several ranks do not go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import zeroweave as zw
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.zoo import Block, Stack, rows
from zeroweave._torch.distributed import all_gather


class Stopping:
    """Stands in for the start of a gather. At call `at` it is interrupted when the gather is under way.

    Rank 1 comes to that `seconds` later.
    """

    def __init__(self, at: int, seconds: float) -> None:
        self._left, self._seconds = at, seconds

    def __call__(self, *arguments: Any) -> dist.Work:
        self._left -= 1
        if self._left == 0 and dist.get_rank() == 1:
            time.sleep(self._seconds)
        work = all_gather(*arguments)
        if self._left == 0:
            raise KeyboardInterrupt("stopped")
        return work


def engine_of(module: Stack) -> Any:
    config = {"stage": 3, "compile": {"enabled": False}, "deadline_seconds": 100.0}
    return zw.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1), config)


def step(engine: Any, index: int) -> float:
    x, y = rows(dist.get_rank(), index)
    loss = F.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


def stopped(at: int, seconds: float) -> tuple[list[str], list[bool], list[str]]:
    """The error's notes, whether flats without holds that lie somewhere have their values, and what later calls say."""
    torch.manual_seed(0)
    module = Stack(lambda index: Block())
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    engine = engine_of(module)
    x, y = rows(dist.get_rank(), 0)
    with (
        patch("zeroweave.comm.process_group.all_gather", Stopping(at, seconds)),
        pytest.raises(KeyboardInterrupt, match="stopped") as raised,
    ):
        engine.backward(F.mse_loss(engine(x), y))
    time.sleep(2 * seconds)
    there = [
        torch.equal(bucket.flat[slot.offset :][: slot.numel], values[slot.name].flatten())
        for bucket in engine._runtime.buckets.values()
        if bucket.resident and not bucket.holds
        for slot in bucket.layout.slots
    ]
    said = []
    for call in (engine.zero_grad, lambda: step(engine, 0), engine.destroy):
        try:
            call()
        except zw.RankFailure as refused:
            said.append(str(refused))
    return getattr(raised.value, "__notes__", []), there, said


@daily("at", [2], [1, 5, 8])
def test_what_an_interrupted_gather_writes_is_still_the_flats(pools: Pools, at: int) -> None:
    """The rank whose gather waits for the other one is not to give the memory back meanwhile."""
    for rank, (notes, there, said) in enumerate(pools(2).run(stopped, at, 0.5)):
        assert there and all(there)
        assert len(notes) == 1 and "this engine cannot go on" in notes[0], notes
        assert len(said) == 3 and all(f"rank {rank} failed in" in each for each in said), said


def caught_elsewhere(seconds: float) -> tuple[list[float], list[float]]:
    """Losses of steps around which a program handles interrupts of its own, and of steps without any."""
    return trained(partial(handles, seconds)), trained(lambda: None)


def trained(beside: Callable[[], None]) -> list[float]:
    """Losses of four steps, with that in the middle of each forward, and behind each step."""
    torch.manual_seed(0)
    module, losses = Stack(lambda index: Block()), []
    module.blocks[1].register_forward_hook(lambda *_: beside())
    with engine_of(module) as engine:
        for index in range(4):
            losses.append(step(engine, index))
            beside()
    return losses


def handles(seconds: float) -> None:
    """An interrupt that leaves no call of the engine; on one rank it takes longer."""
    with pytest.raises(KeyboardInterrupt):
        time.sleep(seconds * dist.get_rank())
        raise KeyboardInterrupt


@pytest.mark.matrix
def test_interrupts_that_leave_no_call_change_nothing(pools: Pools) -> None:
    """As near as a right program comes to it: inside of a call, and between two."""
    for with_them, without in pools(2).run(caught_elsewhere, 0.2):
        assert with_them == without
