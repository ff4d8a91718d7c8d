"""Offload on GPUs: the same bits, pinned host memory, a lower peak, and a host that never waits for a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu import offload_jobs as jobs

Ranks = Callable[..., list[Any]]
MIB = 2**20


@pytest.mark.parametrize(
    ("stage", "mode", "dtype", "offloads"),
    [
        (1, "eager", torch.bfloat16, ["none", "all", "adaptive"]),
        (2, "inductor", torch.bfloat16, ["none", "all"]),
        (3, "inductor", torch.bfloat16, list(jobs.OFFLOADS)),
        (3, "eager", torch.float32, list(jobs.OFFLOADS)),
    ],
)
def test_losses_and_states_are_bit_equal(
    ranks: Ranks, stage: int, mode: str, dtype: torch.dtype, offloads: list[str]
) -> None:
    for plain, *others in ranks(jobs.courses, stage, mode, dtype, offloads):
        assert plain.losses[-1] < plain.losses[0] and plain.departures == 0
        for offload, found in zip(offloads[1:], others, strict=True):
            assert found == plain, offload


@pytest.mark.parametrize(("stage", "mode"), [(1, "eager"), (2, "inductor"), (3, "inductor"), (3, "eager")])
def test_compact_states_are_bit_equal(ranks: Ranks, stage: int, mode: str) -> None:
    for plain, found in ranks(jobs.compact_courses, stage, mode, ["none", "all"]):
        assert plain.losses[-1] < plain.losses[0] and plain.departures == 0
        assert found == plain


@pytest.mark.parametrize(("offload", "away"), [("none", False), ("all", True)])
def test_compact_states_live_in_pinned_host_memory(ranks: Ranks, offload: str, away: bool) -> None:
    for codes, remainders, gathered in ranks(jobs.compact_homes, offload):
        assert (set(codes), set(remainders), set(gathered)) == ({away}, {away}, {False})


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ("none", (False, False, False)),
        ("all", (True, True, False)),
        ("params", (False, True, True)),
        ("both", (True, True, True)),
    ],
)
def test_states_live_in_pinned_host_memory(ranks: Ranks, offload: str, expected: tuple[bool, ...]) -> None:
    for found in ranks(jobs.homes, offload):
        assert tuple(set(each) for each in found) == tuple({each} for each in expected)


def test_the_peak_falls_by_what_leaves_the_device(ranks: Ranks) -> None:
    """In a model with few activations the step itself is the peak: three buckets' states are on the device in it."""
    none = ranks(jobs.peaks, "none")
    for offload in ("all", "both"):
        for plain, found in zip(none, ranks(jobs.peaks, offload), strict=True):
            left = plain.device - found.device
            assert plain.host == 0 and left > 6 * found.largest, (plain, found)
            assert found.peak <= plain.peak - left + 3 * found.largest + 64 * MIB, (plain, found)


def test_adaptive_stays_within_its_budget(ranks: Ranks) -> None:
    none, everything = ranks(jobs.peaks, "none"), ranks(jobs.peaks, "all")
    budget = max((a.peak + b.peak) // 2 for a, b in zip(none, everything, strict=True))
    for plain, least, found in zip(none, everything, ranks(jobs.peaks, "adaptive", budget), strict=True):
        assert least.device < found.device < plain.device, (least, found, plain)
        assert found.peak <= budget, (found, budget)


@pytest.mark.parametrize(
    ("offload", "more"), [("none", {}), ("all", {}), ("both", {}), ("none", jobs.COMPACT), ("all", jobs.COMPACT)]
)
def test_the_host_never_waits_in_a_step(ranks: Ranks, offload: str, more: dict[str, Any]) -> None:
    assert ranks(jobs.runs_ahead, offload, more) == [True, True]
