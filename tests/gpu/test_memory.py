"""Memory on the GPU: what rests between steps, what a step adds, what an engine leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import jobs

MIB = 2**20
WORKSPACES = 96 * MIB
"""What cuBLAS and NCCL keep of the caching allocator once they have been used."""
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def peaks() -> dict[int, list[jobs.Peak]]:
    """Measured once per stage and compared between stages."""
    return {}


@pytest.mark.parametrize("stage", [2, 3])
def test_peak_is_model_states_flats_and_activations(
    ranks: Ranks, peaks: dict[int, list[jobs.Peak]], stage: int
) -> None:
    peaks[stage] = ranks(jobs.peak, stage)
    for found in peaks[stage]:
        assert found.rest <= 1.05 * found.states + WORKSPACES, found
        assert found.grown <= MIB, found
        # A compiled backward hands out its gradients as tensors before they are copied into a flat.
        parts = found.largest
        flats = found.flats + found.gradient_flats + parts
        predicted = found.states + found.gradients + flats + found.activations
        assert found.peak <= 1.1 * predicted + WORKSPACES, (found, predicted)
        assert found.gradient_flats <= 2 * found.largest, found
        assert found.flats <= (2 * found.largest if stage == 3 else found.total), found


def test_stage_3_needs_less_than_stage_2(peaks: dict[int, list[jobs.Peak]]) -> None:
    for two, three in zip(peaks[2], peaks[3], strict=True):
        saved = two.total - 2 * two.largest
        assert three.peak <= two.peak - 0.5 * saved, (two, three)


def test_a_destroyed_engine_leaves_nothing_and_a_second_one_trains_the_same(ranks: Ranks) -> None:
    for left, losses in ranks(jobs.again):
        assert left[0] <= WORKSPACES, left
        assert max(left) - left[0] <= MIB, left
        assert losses[0] == losses[1] == losses[2], losses


def test_two_engines_at_once(ranks: Ranks) -> None:
    for one, two, alone in ranks(jobs.both):
        assert one == two == alone, (one, two, alone)
