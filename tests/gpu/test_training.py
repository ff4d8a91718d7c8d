"""Training on GPUs over NCCL equals training the unsharded model.

Bound on losses in bfloat16, whose unit roundoff is u = 2^-9. It has two terms.

Forward: engine and reference each round their logits z, so that equal weights give logits that differ
by at most 2u·|z| and a cross entropy that differs by at most twice that. Single errors have no common
sign and the loss is their mean over hundreds of tokens, so half of the worst case, with the loss itself
for |z|, is generous: 2u·L.

Training: a gradient has passed some 64 roundings in a row (four blocks, forward and backward), so it is
off by about √64·u = 8u, relative to its norm, in each of the two runs. That part of what was learnt so
far may have gone elsewhere: 16u·(L₀ − L).

The bound is worth something because gradients that are never reduced break it, which is tested too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import jobs

ROUNDOFF = 2.0**-9
Ranks = Callable[..., list[Any]]


def distance(got: list[float], expected: list[float]) -> float:
    """The largest difference of two loss curves, as a multiple of the bound."""
    first = expected[0]
    bounds = [2 * ROUNDOFF * loss + 16 * ROUNDOFF * max(first - loss, 0.0) for loss in expected]
    return max(abs(a - b) / bound for a, b, bound in zip(got, expected, bounds, strict=True))


def check(found: list[tuple[jobs.Run, list[float]]], compiled: bool) -> None:
    for rank, (run, expected) in enumerate(found):
        where = f"rank {rank}: {run.losses} against {expected}, {run.path}"
        assert distance(run.losses, expected) <= 1.0, where
        assert expected[-1] < 0.8 * expected[0], f"the reference did not learn: {where}"
        assert (run.path.compiled_calls > 0) == compiled, where
        assert not run.path.eager_regions, where
        assert run.path.replayed and run.path.on_demand == 0 and run.path.departures == 0, where


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_with_fp32_masters_compiled(ranks: Ranks, stage: int) -> None:
    check(ranks(jobs.losses, stage, "inductor"), compiled=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_with_fp32_masters_eager(ranks: Ranks, stage: int) -> None:
    check(ranks(jobs.losses, stage, "eager"), compiled=False)


@pytest.mark.parametrize("prefetch, depth", [(0, 1), (2, 3)])
def test_schedules_with_other_prefetch_and_depth(ranks: Ranks, prefetch: int, depth: int) -> None:
    check(ranks(jobs.losses, 3, "inductor", prefetch, depth), compiled=True)


def test_the_bound_notices_gradients_that_were_never_reduced(ranks: Ranks) -> None:
    for expected, wrong in ranks(jobs.unreduced):
        assert distance(wrong, expected) > 2.0, f"{wrong} against {expected}"


@pytest.mark.parametrize("mode", ["inductor", "eager"])
def test_stages_agree_bit_for_bit(ranks: Ranks, mode: str) -> None:
    for found in ranks(jobs.stages_bitwise, mode):
        assert found[1] == found[2] == found[3], found


@pytest.mark.parametrize("mode, tolerance", [("inductor", 1e-5), ("eager", 1e-6)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_gradients(ranks: Ranks, stage: int, mode: str, tolerance: float) -> None:
    for rank, differences in enumerate(ranks(jobs.gradients, stage, mode)):
        assert max(differences)[0] <= tolerance, f"rank {rank}: {differences}"
