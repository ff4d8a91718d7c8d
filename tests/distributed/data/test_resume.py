"""Runs that stop in the middle of an epoch and go on, also with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import zeroweave as zw
from tests.support.harness import Pools

WHOLE, SAMPLES = 8, 44
"""Of a global batch, which is left out where it is not full, and of an epoch."""


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that tell their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((6,), index / SAMPLES)


def make() -> zw.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 3))
    config = {"stage": 3, "compile": {"enabled": False}, "deadline_seconds": 120}
    return zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def train(folder: str, world: int, steps: int, resume: bool) -> tuple[list[list[int]], list[float]]:
    """This rank's samples and losses in each step, the random numbers of which are the rank's own. Saves at the end."""
    with make() as engine:
        torch.manual_seed(1 + engine.rank)
        sampler = zw.data.GlobalBatchSampler(SAMPLES, WHOLE // world, drop_last=True)
        loader = DataLoader(Numbered(), batch_sampler=sampler)
        if resume:
            engine.load(folder, data=sampler)
        seen: list[list[int]] = []
        losses = []
        while len(seen) < steps:
            for indices, batch in sampler.counted(loader):
                losses.append(engine.train_step(batch, lambda y, _: y.square().mean()).item())
                seen.append(indices.tolist())
                if len(seen) == steps:
                    break
        engine.save(folder, data=sampler)
        return seen, losses


def together(ranks: list[tuple[list[list[int]], list[float]]]) -> list[list[int]]:
    """The global batches of all ranks' batches."""
    steps = zip(*(seen for seen, _ in ranks), strict=True)
    return [[index for batch in batches for index in batch] for batches in steps]


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((2, 4, 1), marks=pytest.mark.matrix)])
def test_a_run_goes_on_with_other_numbers_of_ranks(pools: Pools, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """Over the end of an epoch, whose five steps are not a multiple of those between two stops."""
    expected = together(pools(2).run(train, str(tmp_path / "whole"), 2, 4 * len(worlds), False))
    folder, found = str(tmp_path / "parts"), []
    for number, world in enumerate(worlds):
        arguments = folder, world, 4, number > 0
        found += together(pools(world).run(train, *arguments) if world > 1 else [train(*arguments)])
    assert found == expected


def test_a_run_goes_on_with_the_same_numbers(pools: Pools, tmp_path: Path) -> None:
    """The resumed run begins with its loader once more, and a loader draws a random number when it begins."""
    whole = pools(2).run(train, str(tmp_path / "whole"), 2, 8, False)
    first = pools(2).run(train, str(tmp_path / "parts"), 2, 3, False)
    then = pools(2).run(train, str(tmp_path / "parts"), 2, 5, True)
    assert [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, then, strict=True)] == whole


# ---------------------------------------------------------------------- loaders of other people
class Stateful:
    """A loader with a position of its own on each rank, as torchdata's has it."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {
            "_snapshot": {"_main_snapshot": {"_sampler_iter_state": None, "_num_workers": 1}, "_snapshot_step": rank},
            "_generator": torch.arange(3, dtype=torch.uint8) + rank,
            "_worker_snapshots": {"worker_0": {"dataset_state": (rank, b"\x00\xff")}},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saved(folder: str, ranks: list[int]) -> None:
    with make() as engine:
        engine.save(folder, data=Stateful(ranks[engine.rank]))


def loaded(folder: str, ranks: list[int]) -> bool:
    """Is it what `saved` was given?"""
    with make() as engine:
        mine, expected = Stateful(99), Stateful(ranks[engine.rank])
        engine.load(folder, data=mine)
        generator = expected.state.pop("_generator")
        return torch.equal(mine.state.pop("_generator"), generator) and mine.state == expected.state


def test_a_position_for_each_rank_comes_back_at_the_same_world_only(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saved, str(tmp_path), [0, 1])
    assert pools(2).run(loaded, str(tmp_path), [0, 1]) == [True, True]
    with pytest.raises(zw.CheckpointError, match=r"for each of 2 ranks, and there are 1 now; zeroweave\.data"):
        loaded(str(tmp_path), [0])


def test_a_position_that_all_ranks_share_comes_back_at_any_world(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saved, str(tmp_path), [7, 7])
    assert loaded(str(tmp_path), [7])


def test_a_position_in_other_data_leaves_the_engine_as_it_is(tmp_path: Path) -> None:
    with make() as engine:
        engine.save(tmp_path, data=zw.data.GlobalBatchSampler(SAMPLES, 4))
        engine.train_step(torch.ones(4, 6), lambda y, _: y.square().mean())
        before = engine.state_dict()
        with pytest.raises(zw.CheckpointError, match="44 samples, and this one has 45"):
            engine.load(tmp_path, data=zw.data.GlobalBatchSampler(SAMPLES + 1, 4))
        assert engine.global_steps == 1
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
