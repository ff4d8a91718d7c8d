"""Offsets and shares of gradients whose buffers the caller brings."""

from __future__ import annotations

import pytest
import torch

from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import lay_out
from zeroweave.dc.targets import GradientPartition, Share, SharesLayout, agree_on_shares, even_shares
from zeroweave.errors import ParameterError


def test_whole_on_every_rank_is_not_sliced() -> None:
    assert agree_on_shares("w", 6, [(6, 0), (6, 40)]) is None
    assert agree_on_shares("empty", 0, [(0, 0), (0, 7)]) is None


@pytest.mark.parametrize(
    ("numel", "held", "shares"),
    [
        (10, [(4, 0), (6, 4)], [(0, 4), (4, 6)]),
        (10, [(2, 0), (5, 2), (3, 7)], [(0, 2), (2, 5), (7, 3)]),  # straddles three ranks
        (10, [(0, 99), (10, 3), (0, 0)], [(0, 0), (0, 10), (0, 0)]),  # all of it on one rank
        (2, [(1, 0), (1, 1), (0, 0), (0, 0)], [(0, 1), (1, 1), (0, 0), (0, 0)]),  # more ranks than elements
    ],
)
def test_shares(numel: int, held: list[tuple[int, int]], shares: list[tuple[int, int]]) -> None:
    assert agree_on_shares("w", numel, held) == tuple(Share(*share) for share in shares)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ([(4, 0), (5, 5)], "no rank holds elements 4 to 5"),
        ([(6, 0), (6, 4)], "several ranks hold element 4"),
        ([(4, 0), (5, 4)], "no rank holds elements 9 to 10"),
        ([(10, 0), (3, 0)], "several ranks hold element 0"),
    ],
)
def test_gaps_and_overlaps_are_named(held: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(ParameterError, match=rf"w: the gradient buffers do not fit together.*({reason})"):
        agree_on_shares("w", 10, held)


def test_even_shares() -> None:
    assert even_shares(7, 3) == (Share(0, 3), Share(3, 3), Share(6, 1))
    assert even_shares(1, 3) == (Share(0, 1), Share(1, 0), Share(1, 0))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_flat_holds_every_share_where_its_rank_finds_it(world: int) -> None:
    """Laying gradients out and cutting the flat into chunks gives each rank its shares, and zeros between."""
    numels = [33, 1, 70, 0]
    shares = [even_shares(n, world) for n in numels]
    layout = SharesLayout(0, 4, world, numels, shares)
    parts = {i: torch.arange(1.0, n + 1) + 100 * i for i, n in enumerate(numels)}
    flat = torch.full((layout.numel,), float("nan"))
    lay_out(flat, parts, layout)
    total = 0.0
    for rank, chunk in enumerate(flat.split(list(layout.chunks))):
        for slot, offset in layout.starts(rank).items():
            share = shares[slot][rank]
            assert torch.equal(chunk[offset : offset + share.numel], parts[slot][share.start :][: share.numel])
            total += float(chunk[offset : offset + share.numel].sum())
    assert total == float(flat.sum())  # nothing but zeros elsewhere


def test_chunks_are_equal_where_that_costs_little() -> None:
    even = SharesLayout(0, 4, 2, [64], [(Share(0, 32), Share(32, 32))])
    assert even.chunks == (32, 32)
    one_sided = SharesLayout(0, 4, 2, [640], [(Share(0, 640), Share(0, 0))])
    assert one_sided.chunks == (640, 32)


def test_a_released_partition_has_no_storage() -> None:
    gauge = Gauge()
    partition = GradientPartition([(7, Share(0, 5)), (9, Share(3, 40))], torch.device("cpu"), gauge)
    assert partition.slices == {7: (0, 0, 5), 9: (32, 3, 40)} and gauge.now == partition.flat.nbytes
    view = partition.view(9)
    partition.release()
    assert gauge.now == 0 and view.untyped_storage().nbytes() == 0
