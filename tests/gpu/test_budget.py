"""Memory budgets on the GPU: what is free is filled, to what was foreseen, and less of it where batches grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.gpu import memory_jobs as jobs

MIB = 2**20
Ranks = Callable[..., list[Any]]
PLAIN: dict[str, Any] = {"keep": "none", "memory_budget": "none"}
"""Nothing that is free is filled. Prefetching with a budget may gather so early that nothing is dropped before."""


def test_what_is_free_is_filled_by_default(ranks: Ranks) -> None:
    plain = ranks(jobs.filled, PLAIN)
    for one, bare in zip(ranks(jobs.filled, {}), plain, strict=True):
        assert one.gradients == bare.gradients
        assert one.kept[-1] == jobs.BLOCKS > bare.kept[-1], "there is room for all"
        assert one.kept[2] == bare.kept[2]
        shared = 1 if torch.cuda.device_count() > 1 else 2
        assert one.room <= one.total / shared * 1.1
        assert one.peak > bare.peak
        assert abs(one.expected - one.peak) <= 0.08 * one.peak, (one.expected, one.peak)


def test_batches_that_grow_take_the_room_back(ranks: Ranks) -> None:
    plain = ranks(jobs.filled, PLAIN)
    cap = int(2.2 * max(each.peak for each in plain))
    one, other = ranks(jobs.filled, {}, cap)
    assert one.rows == other.rows and one.kept == other.kept and one.fingerprints == other.fingerprints
    assert one.kept[jobs.USUAL - 1] == jobs.BLOCKS
    assert one.kept[-1] < jobs.BLOCKS and len(one.told) >= 1, "and nobody ran out of memory"
    for found, bare in zip((one, other), ranks(jobs.filled, PLAIN, cap, one.rows), strict=True):
        assert found.gradients == bare.gradients
