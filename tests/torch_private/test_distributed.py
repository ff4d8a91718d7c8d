"""Process groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeroweave._torch.distributed import (
    all_gather,
    all_gather_together,
    collectives_begun,
    copying_communicator,
    end_process_group,
    new_process_group,
    reduce_scatter,
)

pytestmark = pytest.mark.oldest


def test_a_process_group_can_be_made_again_with_a_store_of_its_own() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in ("first", "second"):
            store, timeout = torch.distributed.HashStore(), timedelta(seconds=60)
            group = new_process_group([0], "gloo", store, name, timeout)
            assert torch.distributed.get_process_group_ranks(group) == [0] and group.group_name == name
            torch.distributed.all_reduce(torch.ones(1), group=group)
            end_process_group(group)
            with pytest.raises(ValueError, match="Invalid process group"):
                torch.distributed.destroy_process_group(group)
            end_process_group(group)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="a build without NCCL")
def test_nccl_has_what_gathers_by_copy_engine_need() -> None:
    names = ("_allgather_base", "allreduce", "deregister_mem_pool", "mem_allocator", "register_mem_pool", "shutdown")
    assert not [name for name in names if not hasattr(torch.distributed.ProcessGroupNCCL, name)]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPUs found"):  # behind its options
            copying_communicator(torch.distributed.HashStore(), 0, 1, "copies", timedelta(seconds=60))


def test_collectives_are_counted_when_they_begin_in_each_group() -> None:
    assert collectives_begun() == {}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        default = torch.distributed.group.WORLD
        assert default is not None
        mine = new_process_group([0], "gloo", torch.distributed.HashStore(), "mine", timedelta(seconds=60))
        before = collectives_begun()
        work = torch.distributed.all_reduce(torch.ones(1), group=mine, async_op=True)
        assert collectives_begun() == {default.group_name: before[default.group_name], "mine": before["mine"] + 1}
        work.wait()
    finally:
        torch.distributed.destroy_process_group()


def test_the_short_ways_to_collectives_are_those_of_the_public_functions() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group, average = torch.distributed.group.WORLD, torch.distributed.ReduceOp.AVG
        assert group is not None
        gathered, reduced = torch.zeros(4), torch.zeros(4)
        all_gather(gathered, torch.ones(4), group).wait()
        reduce_scatter(reduced, torch.ones(4), average, group).wait()
        assert gathered.tolist() == reduced.tolist() == [1.0] * 4
        outputs, inputs = [torch.zeros(4), torch.zeros(2)], [torch.ones(4), torch.full((2,), 2.0)]
        all_gather_together(outputs, inputs, group).wait()
        assert [out.tolist() for out in outputs] == [[1.0] * 4, [2.0] * 2]
    finally:
        torch.distributed.destroy_process_group()
