"""Steps without communication, by name: nothing is sent, and nothing remains of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zeroweave as zw
from tests.support.counting import silent
from tests.support.dc_world import SHAPES, World
from tests.support.harness import Pools
from tests.support.marks import daily
from zeroweave import dc


def window(world: World, updates: str) -> None:
    """A window's backwards, "T" for one that updates."""
    for micro, update in enumerate(updates):
        world.runtime.start_forward()
        loss = world.loss(micro)
        world.runtime.end_forward()
        world.runtime.start_backward(update == "T")
        loss.backward()
        if update == "T":
            world.runtime.end_backward(0)


def by_name(stage: int, held: str) -> None:
    """Profiled windows between a real one and the use of its gradients."""
    with World(stage, held, {"check_every_step": True}) as world:
        runtime = world.runtime
        world.micro_step(0, update=False)
        world.micro_step(1, update=True)
        sent = world.ledger.totals()
        buffers = [None if b is None else b.clone() for b in world.buffers]
        bytes_before = world.ledger.gauge("gradients").now
        runtime.enable_profiling(True)
        assert runtime.is_profiling()
        with silent():
            for _ in range(1 + world.rank):
                window(world, "FT")
                if held == "taken":
                    partition = runtime.take_gradients()
                    assert not any(partition.view(ds_id).any() for ds_id in range(len(SHAPES)))
                    partition.release()
            window(world, "T")
            for buffer, value in zip(world.buffers, buffers, strict=True):
                assert buffer is None or torch.equal(buffer, value)
        planned = runtime.planned.totals()
        runtime.enable_profiling(False)
        assert not runtime.is_profiling()
        assert world.ledger.totals() == sent
        kinds = {"all_reduce"} if held == "whole" else {"reduce_scatter"}
        assert set(planned) == set(sent) == kinds
        for kind in kinds:
            per_backward = sent[kind].calls // (1 if stage == 1 else 2)
            profiled = (1 + world.rank) * (1 if stage == 1 else 2) + 1
            assert planned[kind].calls == per_backward * profiled
            assert planned[kind].payload * sent[kind].calls == sent[kind].payload * planned[kind].calls
            assert planned[kind].wire * sent[kind].calls == sent[kind].wire * planned[kind].calls
        assert world.ledger.gauge("gradients").now == bytes_before
        assert world.difference() <= 1  # the window before is still there
        world.micro_step(2, update=False)
        world.micro_step(3, update=True)
        assert world.difference() <= 1


@daily(
    ("stage", "held"),
    [(2, "cut"), (3, "taken")],
    [(1, "whole"), (1, "taken"), (2, "whole"), (2, "taken"), (3, "cut")],
)
def test_nothing_is_sent_and_nothing_changes(pools: Pools, stage: int, held: str) -> None:
    pools(2).run(by_name, stage, held)


def gather(runtime: Any, shard: Tensor, ds_id: int) -> Tensor:
    gathered = runtime.wait_allgather(runtime.allgather_param(shard, 0, ds_id), 0, ds_id)
    values = gathered.clone()
    runtime.release_param(gathered, 0, ds_id)
    return values


def gathers_by_name(persistent: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    full = torch.arange(1.0, 8.0).view(7, 1)
    padded = F.pad(full.flatten(), (0, -7 % world))
    shard = padded.view(world, -1)[rank].clone()
    fake = torch.cat([shard] * world)[:7].view(7, 1)
    runtime = dc.Runtime(None)
    runtime.register_z3_param(0, (7, 1), shard, persistent=persistent)
    runtime.register_graph_z3(0, [0])
    runtime.start_forward()
    assert torch.equal(gather(runtime, shard, 0), full)
    runtime.end_forward()
    sent = runtime.ledger.totals()
    runtime.enable_profiling(True)
    with silent():
        runtime.start_forward()
        runtime.prefetch_params_fused(0, [shard], [0])
        for _ in range(2 + rank):
            assert torch.equal(gather(runtime, shard, 0), fake)
        runtime.end_forward()
    assert runtime.planned.totals()["all_gather"].calls == (1 if persistent else 2 + rank)
    assert runtime.ledger.totals() == sent
    runtime.enable_profiling(False)
    assert torch.equal(gather(runtime, shard, 0), full)
    assert runtime.ledger.totals()["all_gather"].calls == 2
    runtime.cleanup()


@pytest.mark.parametrize("persistent", [False, True])
def test_gathers_give_the_own_partition(pools: Pools, persistent: bool) -> None:
    pools(2).run(gathers_by_name, persistent)


def switched_too_soon() -> None:
    with World(2, "cut") as world:
        runtime = world.runtime

        def is_refused(on: bool) -> None:
            with pytest.raises(zw.EngineError, match="in the middle of a window"):
                runtime.enable_profiling(on)

        window(world, "F")
        is_refused(True)
        window(world, "T")
        runtime.enable_profiling(True)
        runtime.enable_profiling(True)  # it is on already
        window(world, "F")
        is_refused(False)
        runtime.zero_grad()
        with pytest.raises(zw.EngineError, match="while profiling"):
            runtime.register_param(len(SHAPES), (2,), torch.ones(2))
        with pytest.raises(zw.EngineError, match="while profiling"):
            runtime.register_graph_z2(1, [0])
        with pytest.raises(zw.EngineError, match="while profiling"):
            runtime.update_param_grad_buffer(0, torch.zeros(world.shares[0][1]))
        runtime.enable_profiling(False)
        world.micro_step(0, update=True)
        assert world.difference() <= 1
        runtime.enable_profiling(True)
        window(world, "FF")  # and cleaned up in the middle of it
    with pytest.raises(zw.EngineError, match="cleaned up"):
        runtime.enable_profiling(False)


def test_switching_in_the_middle_of_a_window_is_refused(pools: Pools) -> None:
    pools(2).run(switched_too_soon)
