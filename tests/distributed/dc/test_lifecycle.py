"""Runtimes that come and go over several ranks, and errors that all ranks have together."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.dc_world import World, draw, mean_of
from tests.support.harness import Pools
from tests.support.reference import judge
from zeroweave import dc
from zeroweave.errors import ConfigError, EngineError, ParameterError


def again_and_again(times: int) -> tuple[float, int]:
    """Runtimes one after the other over the same ranks, one rank always late; process groups that are left."""
    before = len(dist.distributed_c10d._world.pg_map)
    worst = 0.0
    for turn in range(times):
        if dist.get_rank() == turn % 2:
            time.sleep(0.02)  # the other one is first at the rendezvous
        dc.init(None, {"double_buffer": bool(turn % 2)}, 10)
        dc.register_param(0, [4], torch.zeros(4), buffer := torch.zeros(4))
        dc.register_graph_z2(0, [0])
        dc.start_backward(True)
        dc.reduce_grad(draw(1 + dist.get_rank(), turn, shape=(4,)), 0, 0)
        dc.end_backward(0)
        dc.cleanup()
        mean = mean_of([draw(1 + rank, turn, shape=(4,)) for rank in range(2)], 2)
        worst = max(worst, judge({"": buffer}, mean)[0])
    return worst, len(dist.distributed_c10d._world.pg_map) - before


def test_init_works_after_every_cleanup(pools: Pools) -> None:
    for worst, left in pools(2).run(again_and_again, 12):
        assert worst <= 1 and left == 0


def unshared_groups() -> float:
    """A Runtime over all ranks while rank 0 has one more process group than the others."""
    own = dist.new_group([0])
    try:
        with World(2, "cut") as world:
            world.micro_step(0, update=True)
            return world.difference()
    finally:
        if own is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(own)


def test_ranks_with_other_groups_beside(pools: Pools) -> None:
    assert max(pools(2).run(unshared_groups)) <= 1


def errors_on_all_ranks(stage: int) -> tuple[list[str], float, float]:
    """Each wrong call is refused on all ranks at once; zero_grad, and the runtime is as new."""
    said = []
    with World(stage, "cut", {"deadline_seconds": 200.0}) as world:
        runtime = world.runtime
        world.micro_step(0, update=True)
        first = world.difference()
        for wrong in (
            lambda: runtime.reduce_grad(torch.zeros(7, 5), 0, 0),
            lambda: runtime.reduce_grad(torch.zeros(5, 7), 1, 0),
            lambda: runtime.start_backward(True),
            lambda: runtime.register_graph_z2(0, [0]),
            lambda: runtime.register_graph_z2(9, [77]),
        ):
            runtime.start_backward(True)
            runtime.reduce_grad(torch.ones(3, 50), 0, 2)  # large: its reduction is under way
            runtime.reduce_grad(torch.ones(7), 0, 1)  # small: it waits
            with pytest.raises((ParameterError, EngineError)) as raised:
                wrong()
            said.append(str(raised.value))
            runtime.zero_grad()
            assert world.ledger.gauge("reduce buckets").now == 0
        world.forget()
        world.micro_step(1, update=False)
        world.micro_step(2, update=True)
        return said, first, world.difference()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_errors_on_all_ranks_leave_the_runtime_usable(pools: Pools, stage: int) -> None:
    for said, first, last in pools(2).run(errors_on_all_ranks, stage):
        assert len(said) == 5 and max(first, last) <= 1, (said, first, last)


def kept_by_reset() -> tuple[float, int]:
    """Gradients that wait in a bucket when the graphs are forgotten are reduced with those that come later."""
    with World(2, "cut", bucket=1000, graphs={0: [0, 1], 1: [2, 3, 4]}) as world:
        runtime = world.runtime
        runtime.start_backward(False)
        for i, p in enumerate(world.mine):
            grad = draw(1, world.rank, i, shape=p.shape)
            world.assign(i, grad)
            runtime.reduce_grad(grad, 0 if i < 2 else 1, i)
        issued = world.ledger.count
        world.recompile()
        world.micro_step(1, update=True)
        return world.difference(), issued


def test_reset_keeps_buckets_and_window(pools: Pools) -> None:
    for difference, issued in pools(2).run(kept_by_reset):
        assert difference <= 1 and issued == 0


def cleaned_in_the_middle() -> float:
    """cleanup with reductions under way and gradients that wait; then another runtime."""
    with World(2, "cut") as world:
        world.runtime.start_backward(True)
        for i in (2, 0, 1):
            world.runtime.reduce_grad(torch.ones(world.mine[i].shape), 0, i)
    assert world.ledger.gauge("reduce buckets").now == 0
    with World(1, "taken") as world:
        world.micro_step(0, update=True)
        return world.difference()


def test_cleanup_in_the_middle_of_a_backward(pools: Pools) -> None:
    assert max(pools(2).run(cleaned_in_the_middle)) <= 1


def other_settings(config: dict[str, Any], bucket: int) -> str:
    """Rank 1 has other settings."""
    mine = (config, bucket) if dist.get_rank() else ({}, 100)
    with pytest.raises(ConfigError) as raised:
        dc.init(None, *mine)
    dc.init(None, {}, 100)  # a failed init leaves nothing behind
    dc.cleanup()
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "bucket", "values"),
    [
        ({"pre_div_reduce": False}, 100, ("pre_div_reduce", "True", "False")),
        ({"reduce_dtype": "bfloat16"}, 100, ("reduce_dtype", "None", "'bfloat16'")),
        ({}, 200, ("initial_reduce_bucket_size", "100", "200")),
    ],
)
def test_other_settings_on_another_rank(
    pools: Pools, config: dict[str, Any], bucket: int, values: tuple[str, ...]
) -> None:
    key, usual, other = values
    said = pools(2).run(other_settings, config, bucket)
    assert said == [
        f"[ZW101] {key} must be the same on all ranks: it is {usual} on rank 0 and {other} on rank 1",
        f"[ZW101] {key} must be the same on all ranks: it is {other} on rank 1 and {usual} on rank 0",
    ]


def taken_graph_id() -> str:
    """Rank 0 has used the graph id in a runtime of its own."""
    solo = dist.new_group([0])
    own = dc.Runtime(solo) if dist.get_rank() == 0 else None
    try:
        if own is not None:
            own.register_param(0, [4], torch.zeros(4))
            own.register_graph_z2(0, [0])
        with World(2, "cut", {"deadline_seconds": 200.0}, graphs={1: range(5)}) as world:
            with pytest.raises(EngineError) as raised:
                world.runtime.register_graph_z2(0, [0])
            world.micro_step(0, update=True)
            assert world.difference() <= 1
            return str(raised.value)
    finally:
        if own is not None:
            own.cleanup()
            dist.destroy_process_group(solo)


def test_a_graph_id_that_one_rank_uses_elsewhere_is_refused_by_all(pools: Pools) -> None:
    first, second = pools(2).run(taken_graph_id)
    assert first == "[ZW401] graph_id 0 belongs to another runtime of this process"
    assert second == f"[ZW401] rank 0 could not register graph 0: {first.removeprefix('[ZW401] ')}"


def sharded(persistent: bool) -> tuple[list[bool], list[int]]:
    """Were the right values gathered, and how many gathers had each step? The third one broke off, once each way."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full = [draw(1, shape=(6, 3)), draw(2, shape=(0, 4))]
    shards = [full[0].flatten().view(world, -1)[rank].clone(), torch.zeros(0)]
    buffers = [torch.zeros_like(shard) for shard in shards]
    runtime = dc.Runtime(None, None, 1000)
    right, gathers = [], []
    try:
        for i in range(2):
            runtime.register_z3_param(i, full[i].shape, shards[i], buffers[i], persistent)
        runtime.register_graph_z3(0, [0, 1])
        for breaks in ("", "", "held", "", "prefetched", ""):
            runtime.ledger.begin_step()
            runtime.start_forward()
            if breaks == "prefetched":
                runtime.prefetch_params_fused(0, shards, [0, 1])
            else:
                for i in range(2):
                    gathered = runtime.wait_allgather(runtime.allgather_param(shards[i], 0, i), 0, i)
                    right.append(torch.equal(gathered, full[i]))
                    if not breaks:
                        runtime.release_param(gathered, 0, i)
                    del gathered
            if breaks:
                runtime.zero_grad()  # after an exception here
                continue
            runtime.start_backward(True)
            for i in range(2):
                runtime.reduce_grad(torch.full(full[i].shape, 1.0 + rank), 0, i)
            runtime.end_backward(0)
            for shard, buffer, values in zip(shards, buffers, full, strict=True):
                shard -= buffer
                values -= sum(range(1, world + 1)) / world
            gathers.append(runtime.ledger.step()["all_gather"].calls)
        return right, gathers
    finally:
        runtime.cleanup()


@pytest.mark.parametrize("persistent", [False, True])
def test_gathers_after_an_exception_and_after_each_update(pools: Pools, persistent: bool) -> None:
    """Each step gathers anew, but for the parameter without elements, of which there is nothing to gather."""
    for right, gathers in pools(2).run(sharded, persistent):
        assert all(right) and gathers == [1, 1, 1, 1]
