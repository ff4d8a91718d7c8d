"""Collectives of a process group: launches of several, and memory that is lent to the backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.recording import layout
from tests.support.harness import Pool
from zeroweave.comm.ledger import Ledger, Traffic
from zeroweave.comm.process_group import ProcessGroupTransport
from zeroweave.comm.transport import Messages
from zeroweave.errors import EngineError

pytestmark = pytest.mark.oldest

LAYOUTS = [replace(layout(world=2, numel=numel), id=id) for id, numel in enumerate((64, 64, 128, 32))]
DTYPE = torch.bfloat16  # gloo has launches of one dtype


def started(launches: bool = False) -> ProcessGroupTransport:
    group = dist.group.WORLD
    assert group is not None
    transport = ProcessGroupTransport(group, torch.device("cpu"), Ledger(2, dist.get_rank()))
    transport._launches = launches  # as with NCCL
    return transport


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank())).to(dtype)


def collected(launches: bool) -> tuple[list[Any], list[Any], int]:
    """What a few gathers of float32 shards, and reductions, leave; and how many collectives were counted."""
    transport = started(launches)
    flats = [torch.zeros(each.numel, dtype=DTYPE) for each in LAYOUTS]
    outs = [torch.zeros(each.shard_numel, dtype=DTYPE) for each in LAYOUTS]
    with transport.together() if launches else nullcontext():
        pending = [
            transport.all_gather(flat, values(each.shard_numel, torch.float32, each.id), each)
            for flat, each in zip(flats, LAYOUTS, strict=True)
        ]
    for each in pending:
        each.wait()
    pending = [
        transport.reduce_scatter(out, {0: values(each.slots[0].numel, out.dtype, each.id)}, each, "predivide")
        for out, each in zip(outs, LAYOUTS, strict=True)
    ]
    for each in pending:
        each.wait()
    return [f.tolist() for f in flats], [out.tolist() for out in outs], transport.ledger.count


def closed() -> None:
    """The group that a closed transport has let go of is not taken for the default one."""
    transport = started()
    transport.close()
    transport.close()
    flat = torch.zeros(LAYOUTS[0].numel, dtype=DTYPE)
    with pytest.raises(EngineError, match="the engine was closed, or its process ends"):
        transport.all_gather(flat, values(LAYOUTS[0].shard_numel, DTYPE, 0), LAYOUTS[0])
    with pytest.raises(EngineError, match="the engine was closed, or its process ends"):
        transport.broadcast(flat)


def test_nothing_is_sent_by_what_was_closed(pools: Callable[[int], Pool]) -> None:
    pools(2).run(closed)


def test_a_launch_gives_what_its_collectives_give_alone(pools: Callable[[int], Pool]) -> None:
    alone, launched = pools(2).run(collected, False), pools(2).run(collected, True)
    assert alone == launched
    assert all(any(flat) for flat in alone[0][0]) and alone[0][2] == 2 * len(LAYOUTS)


def exchanged() -> tuple[list[int], Any]:
    """What this rank has got, and what was counted: ranks send as many bytes as the receiver's number and 1, or 0."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    transport = ProcessGroupTransport(group, torch.device("cpu"), Ledger(world, rank))
    sent = [0 if other < rank else other + 1 for other in range(world)]
    received = [0 if rank < other else rank + 1 for other in range(world)]
    mine = torch.cat([torch.full((n,), 10 * rank + other, dtype=torch.uint8) for other, n in enumerate(sent)])
    out = torch.full((sum(received),), 255, dtype=torch.uint8)
    transport.all_to_all(out, mine, Messages(0, 14, sent, received)).wait()
    return out.tolist(), transport.ledger.totals()


def test_messages_between_ranks_are_of_any_size(pools: Callable[[int], Pool]) -> None:
    counted = {"all_to_all": Traffic(1, 14, 3)}
    assert pools(3).run(exchanged) == [
        ([0], counted),
        ([1, 1, 11, 11], counted),
        ([2] * 3 + [12] * 3 + [22] * 3, counted),
    ]


def gathered_again() -> list[bool]:
    """Is each gather right of a flat that lies here and there, in inference mode and outside of it?"""
    transport, one = started(), LAYOUTS[0]
    flats = [torch.zeros(one.numel, dtype=DTYPE) for _ in range(2)]
    right = []
    for turn, inference in enumerate((True, False, True, False, False)):
        flat = flats[turn // 3]
        with torch.inference_mode(inference):
            transport.all_gather(flat, values(one.shard_numel, torch.float32, turn), one).wait()
        expected = [torch.empty(one.shard_numel, dtype=DTYPE) for _ in range(2)]
        dist.all_gather(expected, values(one.shard_numel, DTYPE, turn))
        right.append(torch.equal(flat, torch.cat(expected)))
    return right


def test_a_flat_is_lent_where_it_lies(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(gathered_again) == [[True] * 5] * 2
