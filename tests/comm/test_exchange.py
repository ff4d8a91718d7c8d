"""What is exchanged, from where it is sent, and what of it is one launch."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.comm.recording import Noting, layout
from zeroweave.comm.exchange import Exchange, Outboxes
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.transport import Parts, ReduceOp
from zeroweave.engine.ways import piece_bytes

WORLD, NUMEL, NBYTES = 2, 64, 256


def boxes(count: int, only_captures: bool = False) -> Outboxes:
    return Outboxes([torch.empty(NBYTES, dtype=torch.uint8) for _ in range(count)], only_captures)


# ---------------------------------------------------------------------- outboxes
def test_an_outbox_is_free_when_nobody_has_it() -> None:
    outboxes = boxes(2)
    first, second = (outboxes.take(NUMEL, torch.float32) for _ in range(2))
    assert first is not None and second is not None and first.data_ptr() != second.data_ptr()
    assert first.shape == (NUMEL,) and first.dtype == torch.float32
    assert outboxes.take(NUMEL, torch.float32) is None
    part, address = first[8:16].view(2, 4), first.data_ptr()
    del first
    assert outboxes.take(NUMEL, torch.float32) is None, "somebody has a part of it"
    del part
    again = outboxes.take(8, torch.bfloat16)
    assert again is not None and again.data_ptr() == address
    assert outboxes.has(again) and outboxes.has(second) and not outboxes.has(torch.empty(NUMEL))


def test_only_captures_get_outboxes_where_there_are_graphs() -> None:
    outboxes = boxes(1, only_captures=True)
    for captures in (False, True):
        with patch("torch.cuda.is_current_stream_capturing", lambda captures=captures: captures):
            assert (outboxes.take(NUMEL, torch.float32) is not None) == captures


# ---------------------------------------------------------------------- what is exchanged
class Done:
    def wait(self) -> None:
        pass


class Other:
    """Another rank that sends the same, times three; the swap of two of them."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted
        self.sent: list[int] = []
        """addresses"""

    def __call__(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        self._noted.append("swap")
        self.sent.append(sent.data_ptr())
        received.view(2, -1)[0].copy_(sent.view(2, -1)[0])
        received.view(2, -1)[1].copy_(sent.view(2, -1)[0]).mul_(3)
        return Done()


def exchange(outboxes: Outboxes) -> tuple[Exchange, list[str], Other, torch.Tensor]:
    """And what is noted of what others do, and the memory of copies."""
    noted: list[str] = []
    other = Other(noted)
    inbox, copies = (torch.empty(NBYTES, dtype=torch.uint8) for _ in range(2))
    inner = Noting("kernel", noted)
    return Exchange(inner, other, inbox, copies, outboxes, Ledger(WORLD, 0)), noted, other, copies


def reduced(transport: Exchange, parts: Parts, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(numel // WORLD, dtype=dtype)
    transport.reduce_scatter(out, parts, layout(WORLD, numel), "average").wait()
    return out


def test_a_flat_is_sent_from_its_outbox_and_all_else_is_copied() -> None:
    transport, _, other, copies = exchange(boxes(1))
    values = torch.randn(NUMEL)
    flat = transport.gradient_flat(layout(WORLD, NUMEL), torch.float32)
    elsewhere = transport.gradient_flat(layout(WORLD, NUMEL), torch.float32)
    for each in (flat, elsewhere, torch.empty(NUMEL, dtype=torch.bfloat16)):
        expected = 2 * each.copy_(values).float()[: NUMEL // WORLD]
        assert reduced(transport, each).equal(expected)
    assert other.sent == [flat.data_ptr(), copies.data_ptr(), copies.data_ptr()]


def test_single_parts_are_laid_out_with_zeros_beside_them() -> None:
    transport, *_ = exchange(boxes(1))
    assert reduced(transport, {}).equal(torch.zeros(NUMEL // WORLD))


@pytest.mark.parametrize(
    ("numel", "dtype", "by"),
    [
        (64, torch.float32, "swap"),
        (128, torch.bfloat16, "swap"),
        (66, torch.float32, "kernel reduces"),
        (130, torch.float16, "kernel reduces"),
        (8, torch.float64, "kernel reduces"),
    ],
)
def test_what_is_larger_than_the_inbox_and_of_other_dtypes_is_reduced_as_ever(
    numel: int, dtype: torch.dtype, by: str
) -> None:
    outboxes = boxes(1)
    transport, noted, *_ = exchange(outboxes)
    flat = transport.gradient_flat(layout(WORLD, numel), dtype)
    assert outboxes.has(flat) == (by == "swap")
    reduced(transport, flat, numel, dtype)
    assert noted == [by]


def test_swaps_lie_outside_of_launches() -> None:
    transport, noted, *_ = exchange(boxes(0))
    with transport.together():
        for numel in (66, 66, 64, 66):
            reduced(transport, {}, numel)
    with transport.together():
        reduced(transport, {}, 64)
    reduced(transport, {}, 66)
    with transport.together():
        for _ in range(2):
            transport.all_gather(torch.empty(NUMEL), torch.empty(NUMEL // WORLD), layout(WORLD, NUMEL))
    reduces = "kernel reduces"
    expected = ["(", reduces, reduces, ")", "swap", "(", reduces, ")", "swap", reduces, "(", "kernel", "kernel", ")"]
    assert noted == expected


def test_what_is_divided_first_cannot_be_too_large() -> None:
    transport, *_ = exchange(boxes(0))
    large = torch.full((NUMEL,), torch.finfo(torch.float32).max / 3)
    out = torch.empty(NUMEL // WORLD)
    ops: list[tuple[ReduceOp, bool]] = [("average", False), ("predivide", True)]
    for op, finite in ops:
        transport.reduce_scatter(out, large, layout(WORLD, NUMEL), op).wait()
        assert bool(out.isfinite().all()) == finite, op


def test_an_exchange_that_is_closed_keeps_no_memory() -> None:
    outboxes = boxes(1)
    transport, noted, _, copies = exchange(outboxes)
    left = weakref.ref(copies)
    del copies
    transport.close()
    assert left() is None and outboxes.take(8, torch.float32) is None
    reduced(transport, {})
    assert noted == ["kernel reduces"]


def test_the_ledger_has_a_swap_as_the_reduction_that_it_is() -> None:
    transport, *_ = exchange(boxes(0))
    reduced(transport, {}, 64)
    (traffic,) = transport._ledger.totals().values()
    assert traffic.calls == 1


# ---------------------------------------------------------------------- how large
def test_memory_is_as_large_as_most_flats_need() -> None:
    assert piece_bytes([386] * 36 + [1244, 1244]) == 386
    assert piece_bytes([386, 1] * 36 + [1244]) == 386, "most bytes, not most buckets"
    assert piece_bytes([10, 20]) == 20
    assert piece_bytes([7]) == 7
