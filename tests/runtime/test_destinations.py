"""Gradients written where they are reduced from: what comes out is each gradient once, however many came how."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.comm.process_group import LocalTransport
from zeroweave.layout import BucketLayout, ParameterSpec, build_layout
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.shard import Shard
from zeroweave.runtime.transfers import Transfers

SHAPES = (8, 8), (4, 4), (3,), (2, 8), (5,)
"""The last one does not begin where memory is aligned."""


def make(reduce_dtype: torch.dtype | None = None, sums: torch.dtype = torch.float32) -> Gradients:
    specs = [ParameterSpec(f"p{i}", shape, "float32", 4, True, None) for i, shape in enumerate(SHAPES)]
    (layout,) = build_layout(specs, 1, 1 << 20)
    device = torch.device("cpu")
    transport = LocalTransport(device)
    home = Shard(layout, torch.float32, transport, Transfers(device))
    bucket = Bucket(layout, torch.float32, transport, Gauge(), home, device)
    return Gradients([bucket], transport, op="average", reduce_dtype=reduce_dtype, accumulate_dtype=sums)


def layout_of(gradients: Gradients) -> BucketLayout:
    return gradients.accounts[0].bucket.layout


def contribute(gradients: Gradients, slot: int, value: torch.Tensor, written: bool) -> bool:
    """One gradient of a slot; written where it may be, if it may. Was it?"""
    place = gradients.destination(0, slot) if written else None
    if place is not None:
        assert place.shape == value.shape and place.is_contiguous()
        value = place.copy_(value)
    gradients.deliver((), [(0, slot, value)])
    return place is not None


def reduced(gradients: Gradients) -> torch.Tensor:
    gradients.issue(0)
    gradients.reductions.settle_all()
    gradients.end_backward()
    shard = gradients.shard(0)
    assert shard is not None
    return shard


def expected(gradients: Gradients, sums: Mapping[int, torch.Tensor]) -> torch.Tensor:
    layout = layout_of(gradients)
    flat = torch.zeros(layout.numel)
    for slot, value in sums.items():
        place = layout.slots[slot]
        flat[place.offset : place.offset + place.numel] = value.flatten()
    return flat


@pytest.mark.parametrize("seed", range(40))
def test_every_gradient_enters_once_wherever_it_lies(seed: int) -> None:
    draw = random.Random(seed)
    gradients, total = make(), torch.zeros(0)
    for _ in range(3):  # backwards of one window
        sums: dict[int, torch.Tensor] = {}
        for _ in range(draw.randint(1, 9)):
            slot = draw.randrange(len(SHAPES))
            value = torch.randint(-8, 8, SHAPES[slot]).float()
            contribute(gradients, slot, value.clone(), draw.random() < 0.7)
            sums[slot] = sums.get(slot, torch.zeros(SHAPES[slot])) + value
            if draw.random() < 0.2:  # a backward that nobody wants, or that fails
                gradients.destination(0, draw.randrange(len(SHAPES)))
        total = expected(gradients, sums) + (total if total.numel() else 0.0)
        assert torch.equal(reduced(gradients), total)


def test_what_is_written_in_its_place_is_not_copied() -> None:
    gradients = make()
    written = [contribute(gradients, slot, torch.full(SHAPES[slot], 2.0), True) for slot in (0, 1)]
    place = gradients.accounts[0].parts[0].untyped_storage().data_ptr()
    contribute(gradients, 2, torch.ones(3), False)
    shard = reduced(gradients)
    assert written == [True, True] and shard.untyped_storage().data_ptr() == place
    offsets = [slot.offset * 4 for slot in layout_of(gradients).slots]
    assert [gradients.destination(0, slot) is not None for slot in range(len(SHAPES))] == [
        offset % 16 == 0 for offset in offsets
    ]


def test_a_place_is_given_once() -> None:
    gradients = make()
    assert gradients.destination(0, 0) is not None and gradients.destination(0, 0) is None
    gradients.end_backward()
    place = gradients.destination(0, 0)
    assert place is not None
    gradients.deliver((), [(0, 0, place.fill_(1.0))])
    assert gradients.destination(0, 0) is None, "a second gradient is added to the first"


def test_a_reduction_reads_no_place_that_may_still_be_written() -> None:
    gradients = make()
    contribute(gradients, 1, torch.ones(SHAPES[1]), True)
    late = gradients.destination(0, 0)
    assert late is not None
    gradients.issue(0)
    late.fill_(torch.nan)
    gradients.reductions.settle_all()
    shard = gradients.shard(0)
    assert shard is not None and torch.equal(shard, expected(gradients, {1: torch.ones(SHAPES[1])}))


def test_there_is_no_place_where_gradients_travel_in_another_dtype() -> None:
    gradients = make(torch.bfloat16)
    assert gradients.destination(0, 0) is None


def test_backwards_that_are_not_reduced_add_up() -> None:
    gradients = make()
    for value in (1.0, 2.0):
        contribute(gradients, 0, torch.full(SHAPES[0], value), True)
        gradients.fold([0])
        gradients.end_backward(reduced=False)
        assert gradients.destination(0, 1) is None
    contribute(gradients, 0, torch.full(SHAPES[0], 4.0), True)
    assert torch.equal(reduced(gradients), expected(gradients, {0: torch.full(SHAPES[0], 7.0)}))


def add(gradients: Gradients, slot: int, value: torch.Tensor) -> bool:
    """One gradient of a slot, added to its local sum, if it may be. Was it?"""
    place = gradients.sum_of(0, slot)
    if place is not None:
        assert place.shape == value.shape and place.is_contiguous()
        value = place.add_(value)
    gradients.deliver((), [(0, slot, value)])
    return place is not None


@pytest.mark.parametrize("seed", range(40))
def test_what_is_added_enters_once_too(seed: int) -> None:
    draw = random.Random(seed)
    gradients, sums = make(), dict[int, torch.Tensor]()
    folds = draw.randint(0, 3)
    for backward in range(folds + 1):
        for _ in range(draw.randint(0, 6)):
            slot = draw.randrange(len(SHAPES))
            value = torch.randint(-8, 8, SHAPES[slot]).float()
            sums[slot] = sums.get(slot, torch.zeros(SHAPES[slot])) + value
            if folds and draw.random() < 0.6:
                assert add(gradients, slot, value.clone()) == (layout_of(gradients).slots[slot].offset * 4 % 16 == 0)
            else:
                contribute(gradients, slot, value.clone(), False)
        if backward < folds:
            gradients.fold([0])
            gradients.end_backward(reduced=False)
    assert gradients.accounts[0].had_gradient == sums.keys()
    assert torch.equal(reduced(gradients), expected(gradients, sums))


def test_a_bucket_whose_gradients_were_added_is_complete() -> None:
    gradients = make()
    gradients.announce([(0, 0)])
    place = gradients.sum_of(0, 0)
    assert place is not None
    assert gradients.deliver([(0, 0)], [(0, 0, place.add_(1.0))]) == [0]
    gradients.fold([0])
    gradients.end_backward(reduced=False)
    gradients.announce([(0, 0)])
    assert gradients.deliver([(0, 0)], [(0, 0, place.add_(1.0))]) == [0], "in each backward"
    assert gradients.written == 2 and gradients.local_peak == 4 * layout_of(gradients).numel


def test_what_comes_behind_a_reduction_is_not_added_to_its_sum() -> None:
    """It would be lost: the sum is on its way."""
    gradients = make()
    assert add(gradients, 0, torch.ones(SHAPES[0]))
    gradients.fold([0])
    gradients.end_backward(reduced=False)
    assert add(gradients, 0, torch.ones(SHAPES[0]))
    gradients.issue(0)
    assert not add(gradients, 0, torch.full(SHAPES[0], 4.0)) and gradients.late() == b"\1"
    gradients.issue(0)
    gradients.reductions.settle_all()
    shard = gradients.shard(0)
    assert shard is not None and torch.equal(shard, expected(gradients, {0: torch.full(SHAPES[0], 6.0)}))


def test_nothing_is_added_to_sums_of_another_dtype() -> None:
    gradients = make(sums=torch.float64)
    assert gradients.sum_of(0, 0) is None and gradients.accounts[0].local is None


def test_what_was_written_in_place_is_counted() -> None:
    gradients = make()
    contribute(gradients, 1, torch.ones(4, 4), written=True)
    assert gradients.written == 0
    gradients.reset()
    contribute(gradients, 1, torch.ones(4, 4), written=True)
    contribute(gradients, 2, torch.ones(3), written=False)
    reduced(gradients)
    assert gradients.written == 1


def test_a_gradient_that_is_all_of_its_bucket_is_the_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else has its memory. One that is added to another, or is somebody's, is copied."""
    monkeypatch.setattr(f"{__name__}.SHAPES", ((8, 8),))
    first, second = torch.randn(8, 8), torch.randn(8, 8)

    def lies(made: list[bool], values: list[torch.Tensor]) -> bool:
        gradients = make()
        for mine, value in zip(made, values, strict=True):
            gradients.deliver((), [(0, 0, value)], {(0, 0)} if mine else frozenset())
        result = reduced(gradients)
        assert torch.equal(result, sum(values, torch.zeros(8, 8)).view(-1))
        assert gradients.written == (result.data_ptr() == values[-1].data_ptr())
        return bool(gradients.written)

    assert lies([True], [first])
    assert not lies([False], [first])
    assert not lies([True, True], [first, second])
    assert not lies([False, True], [first, second])


def test_a_gradient_beside_others_is_no_flat() -> None:
    gradients, value = make(), torch.randn(8, 8)
    gradients.deliver((), [(0, 0, value)], {(0, 0)})
    assert reduced(gradients).data_ptr() != value.data_ptr() and not gradients.written
