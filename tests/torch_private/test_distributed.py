"""Process groups and symmetric memory."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from zeroweave._torch.distributed import all_gather, collectives_begun, new_process_group, reduce_scatter

pytestmark = pytest.mark.oldest


def test_symmetric_memory_is_found() -> None:
    import torch.distributed._symmetric_memory as symmetric

    assert callable(symmetric.empty) and callable(symmetric.rendezvous)


def test_a_process_group_can_be_made_again_with_a_store_of_its_own() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in ("first", "second"):
            store, timeout = torch.distributed.HashStore(), timedelta(seconds=60)
            group = new_process_group([0], "gloo", store, name, timeout)
            assert torch.distributed.get_process_group_ranks(group) == [0] and group.group_name == name
            torch.distributed.all_reduce(torch.ones(1), group=group)
            torch.distributed.destroy_process_group(group)
    finally:
        torch.distributed.destroy_process_group()


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


def test_the_short_way_to_a_collective_is_that_of_the_public_function() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert group is not None
        gathered, reduced = torch.zeros(4), torch.zeros(4)
        all_gather(gathered, torch.ones(4), group).wait()
        reduce_scatter(reduced, torch.ones(4), torch.distributed.ReduceOp.AVG, group).wait()
        assert gathered.tolist() == reduced.tolist() == [1.0] * 4
        gathered.zero_()
        with _coalescing_manager(group, async_ops=True) as together:  # gloo has none for a device
            all_gather(gathered, torch.ones(4), group)
            assert not gathered.any(), "it is launched at the end of the scope"
        for work in together.works:
            work.wait()
        assert gathered.tolist() == [1.0] * 4
    finally:
        torch.distributed.destroy_process_group()
