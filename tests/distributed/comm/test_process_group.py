"""Collectives of a process group: launches of several, and memory that is lent to the backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.comm.recording import layout
from tests.support.harness import Pool
from zeroweave.comm import process_group
from zeroweave.comm.ledger import Ledger, Traffic
from zeroweave.comm.process_group import ProcessGroupTransport, lay_out
from zeroweave.comm.transport import Messages
from zeroweave.layout import Slot

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
    with transport.together() if launches else nullcontext():
        pending = [
            transport.reduce_scatter(out, {0: values(each.slots[0].numel, out.dtype, each.id)}, each, "predivide")
            for out, each in zip(outs, LAYOUTS, strict=True)
        ]
    for each in pending:
        each.wait()
    return [f.tolist() for f in flats], [out.tolist() for out in outs], transport.ledger.count


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


def reduced_as_it_lies(op: Any, shape: tuple[int, ...], divisor: int | None, more: bool) -> tuple[int, bool, bool]:
    """How often a bucket's gradient was laid out; is the result that of the flat, and the gradient what it was?

    `more`: a slot without a gradient lies in the bucket, too.
    """
    group, one = dist.group.WORLD, layout(world=2, numel=64)
    assert group is not None
    if more:
        one = replace(one, slots=(Slot("first", 0, 32, (32,)), Slot("second", 32, 32, (32,))))
    gradient = values(one.slots[0].numel, torch.float32, 1)
    gradient = gradient.view(shape) if len(shape) == 1 else gradient.view(shape).t()
    before, outs = gradient.clone(), [torch.zeros(one.shard_numel) for _ in range(2)]
    laid_out = []
    with patch.object(process_group, "lay_out", lambda *args: (laid_out.append(1), lay_out(*args))):
        transport = ProcessGroupTransport(group, torch.device("cpu"), Ledger(2, dist.get_rank()), divisor=divisor)
        transport.reduce_scatter(outs[0], {0: gradient}, one, op).wait()
    flat = torch.zeros(one.numel)
    lay_out(flat, {0: gradient}, one)
    transport.reduce_scatter(outs[1], flat, one, op).wait()
    return len(laid_out), torch.equal(*outs) and (more or bool(outs[0].any())), torch.equal(gradient, before)


@pytest.mark.parametrize(
    ("op", "shape", "divisor", "more", "laid_out"),
    [
        ("average", (64,), None, False, 0),
        ("average", (8, 8), None, False, 1),  # as a transposed matrix lies
        ("average", (64,), 4, False, 1),  # what divides writes
        ("predivide", (64,), None, False, 1),
        ("average", (32,), None, True, 1),
    ],
)
def test_the_only_gradient_of_a_bucket_is_reduced_where_it_lies(
    op: str, shape: tuple[int, ...], divisor: int | None, more: bool, laid_out: int, pools: Callable[[int], Pool]
) -> None:
    assert pools(2).run(reduced_as_it_lies, op, shape, divisor, more) == [(laid_out, True, True)] * 2
