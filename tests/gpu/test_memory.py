"""Memory on the GPU: what rests between steps, what a step adds, what an engine leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gpu import jobs

MIB = 2**20
WORKSPACES = 96 * MIB
"""What cuBLAS and NCCL keep of the caching allocator once they have been used."""
Ranks = Callable[..., list[Any]]


def check(found: jobs.Peak, flats: int) -> None:
    """The peak of a stage that has so many bytes of flats at most."""
    assert found.rest <= 1.05 * found.states + WORKSPACES, found
    assert found.grown <= MIB, found
    # A compiled backward hands out its gradients as tensors before they are copied into a flat.
    there = found.flats + found.gradient_flats + found.largest
    predicted = found.states + found.gradients + there + found.activations
    assert found.peak <= 1.1 * predicted + WORKSPACES, (found, predicted)
    assert found.flats <= flats and found.gradient_flats <= 2 * found.largest + found.small, found


def test_peak_is_model_states_flats_and_activations(ranks: Ranks) -> None:
    for two, three in zip(ranks(jobs.peak, 2), ranks(jobs.peak, 3), strict=True):
        check(two, two.total)
        check(three, 2 * three.largest + three.small)
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
