"""Gathers in registered buffers: the same bits as elsewhere, whichever flat is there before."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.distributed.experts import Result, train
from tests.distributed.runtime.test_uneven_random import several
from tests.distributed.runtime.test_views import kept_views
from tests.distributed.schedule.test_kinds import MIXED, alternating, at_random, training, window
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from tests.support.registered import in_registered_buffers
from tests.support.zoo import rows


def trained(stage: int, mode: str, stray: bool) -> list[str]:
    """Hashes of the gradients of some windows, with evaluation and whole parameters in between.

    `stray`: windows that depart from their schedule, and views that user code keeps.
    """
    kept: list[Any] = []
    found = []
    with training(mode, stage, **({"prefetch": 0} if stray else {"record_steps": 1})) as engine:
        for index in range(10):
            found.append(window(engine, 2 if stray and index in (4, 7) else 1, stray and index in (5, 7)))
            if stray:
                with torch.no_grad():
                    engine(rows(engine.rank, index)[0])
            if stray and index in (3, 6):
                with engine.full_parameters() as full:
                    kept.append({name: value.clone() for name, value in full.items()})
            if index == 8:
                engine.reschedule(prefetch=2)
        values = engine.state_dict()
        memory = engine.stats.memory
        assert (memory.symmetric > 0) == bool(engine.schedule.registered_buffers)
        found += [str(float(value.double().sum())) for value in values.values()]
    return found


def both_ways(stage: int, mode: str, stray: bool) -> tuple[bool, int, int, int]:
    """Are the bits the same? And buffers made, gathers in them, and evictions."""
    plain = trained(stage, mode, stray)
    found, slabs = in_registered_buffers(trained, stage, mode, stray)
    return found == plain, slabs.made, slabs.gathers, slabs.evicted


@slow("3-aot_eager-True")
@daily(
    ("stage", "mode", "stray"),
    [(3, "aot_eager", True), (2, "eager", False)],
    [
        (1, "eager", True),
        (1, "aot_eager", False),
        (2, "eager", True),
        (2, "aot_eager", True),
        (3, "aot_eager", False),
        (3, "eager", True),
    ],
)
def test_the_bits_are_those_of_other_gathers(pools: Pools, stage: int, mode: str, stray: bool) -> None:
    for same, made, gathers, evicted in pools(2).run(both_ways, stage, mode, stray):
        assert same and made and gathers
        assert evicted or not stray or stage < 3


def short_of_memory(most: int) -> tuple[bool, int, list[str], str]:
    """Are the bits the same where there are so few buffers? Gathers there, what is told, and what `stats` says."""

    def job() -> tuple[list[str], str]:
        found = []
        with training("eager", 3, prefetch=2) as engine:
            for _ in range(6):
                found.append(window(engine, 1, False))
            return found, engine.stats.gathers

    plain, _ = job()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found, gathers), slabs = in_registered_buffers(job, most=most)
    told = [str(each.message) for each in caught if "transport.gathers" in str(each.message)]
    return found == plain, slabs.gathers, told, gathers


@daily("most", [1], [0])
def test_memory_that_runs_out_is_told_once_and_costs_no_bit(pools: Pools, most: int) -> None:
    for rank, (same, gathers, told, said) in enumerate(pools(2).run(short_of_memory, most)):
        assert same and bool(gathers) == bool(most)
        assert len(told) == (rank == 0) and all("is gathered by kernel from now on" in each for each in told), told
        assert said.startswith("by copy engine") and "by kernel from" in said, said


def placed_views(stage: int, keepers: tuple[int, ...]) -> tuple[list[bool], int]:
    right, slabs = in_registered_buffers(kept_views, stage, keepers)
    return right, slabs.gathers


@daily("stage", [3], [1, 2])
def test_views_stay_right_where_another_rank_has_none(pools: Pools, stage: int) -> None:
    for right, gathers in pools(2).run(placed_views, stage, (0,)):
        assert all(right) and gathers, right


def placed_kinds(stage: int, mode: str) -> tuple[list[int], int]:
    (departed, _, _), slabs = in_registered_buffers(alternating, MIXED, 8, mode, stage)
    return departed, slabs.made


@pytest.mark.matrix
def test_windows_of_several_kinds_share_what_was_made(pools: Pools) -> None:
    for departed, made in pools(2).run(placed_kinds, 3, "eager"):
        assert all(index < 2 * len(MIXED) for index in departed)
        assert made <= 6


def at_random_placed(seed: int, mode: str, stage: int) -> int:
    _, slabs = in_registered_buffers(at_random, seed, mode, stage)
    return slabs.gathers


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.parametrize(("stage", "mode"), [(1, "aot_eager"), (2, "eager"), (3, "aot_eager"), (3, "eager")])
def test_windows_of_any_kind_in_any_order(pools: Pools, stage: int, mode: str, seed: int) -> None:
    assert all(pools(2).run(at_random_placed, seed, mode, stage))


def several_placed(seeds: range, mode: str) -> tuple[dict[str, list[str]], int]:
    """As `several`, in registered buffers; and the gathers there."""
    found, slabs = in_registered_buffers(several, seeds, mode)
    return found, slabs.gathers


@daily(
    ("mode", "seeds"),
    [("eager", range(1))],
    [("eager", range(1, 13)), ("aot_eager", range(100, 104)), ("aot_eager", range(1000, 1010))],
)
def test_ranks_that_use_different_parts(pools: Pools, mode: str, seeds: range) -> None:
    for found, gathers in pools(2).run(several_placed, seeds, mode, deadline=600.0):
        assert not found, found
        assert gathers


def placed_experts(stage: int, mode: str) -> tuple[Result, int]:
    """Experts that two of four ranks share, and what all four do."""
    found, slabs = in_registered_buffers(train, stage, mode, 2)
    return found, slabs.gathers


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "mode"), [(3, "eager"), (3, "aot_eager"), (2, "eager")])
def test_groups_of_ranks_share_buffers(pools: Pools, stage: int, mode: str) -> None:
    for found, gathers in pools(4).run(placed_experts, stage, mode):
        assert max(found.gradients)[0] <= 1 and found.parameters[0] <= 1 and gathers, found
