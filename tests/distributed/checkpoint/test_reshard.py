"""What any number of ranks saves at any stage, any other number loads at any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint.runs import Facts, differing, everything, make, train
from tests.support.harness import Pools
from tests.support.marks import daily

PLACES = [(world, stage) for world in (1, 2, 3, 4) for stage in (1, 2, 3)]
BUCKETS = {"bucket": {"bytes": 700}}


def save(folder: Path, stage: int, optimizer: str, more: dict[str, Any]) -> tuple[Facts, list[float]]:
    with make("odd", optimizer, stage, "eager", 0, **more) as engine:
        train(engine, 3)
        engine.save(folder)
        return everything(engine), train(engine, 1)


def load(folder: Path, stage: int, optimizer: str, more: dict[str, Any]) -> tuple[Facts, list[float]]:
    if stage != 3:  # which alone has parameters in host memory
        more = {key: value for key, value in more.items() if key != "offload"}
    with make("odd", optimizer, stage, "eager", 1, **more) as engine:
        engine.load(folder)
        return everything(engine), train(engine, 1)


def mean(ranks: list[tuple[Facts, list[float]]]) -> float:
    """The loss of all ranks' rows, which are equally many on each."""
    return sum(losses[0] for _, losses in ranks) / len(ranks)


def check(
    pools: Pools,
    folder: Path,
    of: tuple[int, int],
    to: list[tuple[int, int]],
    more: dict[str, Any],
    optimizer: str = "adamw",
) -> None:
    world, stage = of
    saved = pools(world).run(save, folder, stage, optimizer, more)
    for other, theirs in to:
        loaded = pools(other).run(load, folder, theirs, optimizer, more)
        for rank, (facts, _) in enumerate(loaded):
            where = f"{of} -> {other, theirs}, rank {rank}"
            if rank >= world:  # a rank that the run has not had draws its own
                facts["own"].pop("random numbers")
            expected = {**saved[0][0], "own": {**saved[min(rank, world - 1)][0]["own"]}}
            if rank >= world:
                expected["own"].pop("random numbers")
            assert differing(expected, facts, where) == []
        assert abs(mean(loaded) - mean(saved)) <= 1e-6 * abs(mean(saved)), f"{of} -> {other, theirs}"


@daily(
    ("of", "to"),
    [((2, 3), [(3, 1), (2, 2)])],
    [((3, 2), [(2, 3)]), *((place, PLACES) for place in PLACES)],
)
def test_other_worlds_and_stages(pools: Pools, tmp_path: Path, of: tuple[int, int], to: list[tuple[int, int]]) -> None:
    check(pools, tmp_path, of, to, BUCKETS)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "more",
    [
        {"offload": {"optimizer": "all"}},
        {"offload": {"optimizer": "all", "params": True}},
        {"precision": {"params": "bfloat16"}},
        {"precision": {"params": "float16", "initial_loss_scale": 2.0**14, "loss_scale_window": 2}},
        {"bucket": {"by_block": False}},
        {"bucket": {"by_block": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("of", [(2, 3), (4, 3)])
def test_settings(pools: Pools, tmp_path: Path, of: tuple[int, int], more: dict[str, Any]) -> None:
    check(pools, tmp_path, of, [(1, 2), (3, 3), (4, 3)], {} if "precision" in more else more)


@pytest.mark.matrix
def test_states_of_whole_matrices(pools: Pools, tmp_path: Path) -> None:
    check(pools, tmp_path, (2, 3), [(1, 1), (3, 2), (2, 3)], BUCKETS, "muon")
