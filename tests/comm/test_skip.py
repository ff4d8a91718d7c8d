"""The wire while it skips: nothing is issued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.comm.recording import RecordingTransport, layout
from zeroweave.comm.ledger import Traffic
from zeroweave.comm.process_group import LocalTransport
from zeroweave.comm.transport import Messages
from zeroweave.comm.wrappers import Wire

CPU = torch.device("cpu")
LAYOUT = layout(world=2, numel=6)
SHARD = torch.tensor([1.0, 2.0, 3.0])
SENT = torch.tensor([7, 8, 9], dtype=torch.uint8)


def skipping() -> tuple[Wire, RecordingTransport]:
    inner = RecordingTransport(rank=1, world=2)
    transport = Wire(inner, CPU)
    transport.skip(True)
    return transport, inner


CALLS: list[Callable[[Any], Any]] = [
    lambda t: t.all_gather(torch.empty(6), SHARD, LAYOUT),
    lambda t: t.reduce_scatter(torch.empty(3), {0: torch.ones(6)}, LAYOUT, "average"),
    lambda t: t.all_reduce(torch.empty(6), {0: torch.ones(6)}, LAYOUT, "predivide"),
    lambda t: t.all_to_all(torch.empty(5, dtype=torch.uint8), SENT, Messages(0, 9, [1, 2], [3, 2])),
    lambda t: t.broadcast(torch.ones(2)),
    lambda t: t.all_reduce_sum(torch.ones(2)),
]
KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "all_reduce_sum"]


def test_off_everything_is_handed_on() -> None:
    inner = RecordingTransport(rank=1, world=2)
    transport = Wire(inner, CPU)
    for call in CALLS:
        call(transport)
    assert [kind for kind, _ in inner.calls] == KINDS
    assert (transport.rank, transport.world) == (1, 2)
    assert not transport.planned.count
    assert transport.empty(4, torch.bfloat16).shape == (4,)


def test_on_nothing_is_handed_on_until_it_is_off_again() -> None:
    transport, inner = skipping()
    for call in CALLS:
        call(transport)
    assert inner.calls == [] and transport.planned.count == len(CALLS)
    transport.skip(False)
    for call in CALLS:
        call(transport)
    assert [kind for kind, _ in inner.calls] == KINDS and transport.planned.count == len(CALLS)


def test_a_gather_gives_copies_of_the_own_shard_in_the_flats_dtype() -> None:
    transport, _ = skipping()
    flat = torch.full((6,), torch.nan, dtype=torch.bfloat16)
    pending = transport.all_gather(flat, SHARD.clone().requires_grad_(), LAYOUT)
    pending.wait()
    assert flat.tolist() == [1, 2, 3, 1, 2, 3] and not flat.requires_grad
    with pytest.raises(RuntimeError, match="twice"):
        pending.wait()


@pytest.mark.parametrize(("kind", "numel"), [("reduce_scatter", 3), ("all_reduce", 6)])
def test_reductions_give_zeros(kind: str, numel: int) -> None:
    transport, _ = skipping()
    out, part = torch.full((numel,), torch.nan), torch.ones(6)
    getattr(transport, kind)(out, {0: part}, LAYOUT, "average").wait()
    assert not out.any() and bool(part.all())


@pytest.mark.parametrize(("sent", "received"), [(SENT, [7, 8, 9, 7, 8]), (SENT[:0], [0] * 5)])
def test_an_all_to_all_receives_what_is_sent(sent: torch.Tensor, received: list[int]) -> None:
    transport, _ = skipping()
    out = torch.full((5,), 255, dtype=torch.uint8)
    transport.all_to_all(out, sent, Messages(0, 9, [1, 2], [3, 2])).wait()
    assert out.tolist() == received


def test_sums_and_broadcasts_leave_their_tensor() -> None:
    transport, _ = skipping()
    tensor = torch.tensor([1.0, 2.0])
    transport.all_reduce_sum(tensor)
    transport.broadcast(tensor)
    assert tensor.tolist() == [1, 2]


def test_planned_is_what_would_have_been_sent() -> None:
    transport, _ = skipping()
    for call in CALLS:
        call(transport)
    assert transport.planned.totals() == {
        "all_gather": Traffic(1, 24, 12),
        "reduce_scatter": Traffic(1, 24, 12),
        "all_reduce": Traffic(2, 24 + 8, 24 + 8),
        "all_to_all": Traffic(1, 9, 2),
        "broadcast": Traffic(1, 8, 4),
    }
    transport.skip(True)
    assert transport.planned.totals() == {}


def test_a_world_of_one_plans_nothing() -> None:
    transport = Wire(LocalTransport(CPU), CPU)
    transport.skip(True)
    flat = torch.empty(3)
    transport.all_gather(flat, SHARD, layout(world=1, numel=3)).wait()
    assert torch.equal(flat, SHARD) and not transport.planned.count
