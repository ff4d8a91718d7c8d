"""Process groups and symmetric memory."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeroweave._torch.distributed import new_process_group

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
