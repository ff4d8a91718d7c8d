"""A sampler with one position for all ranks: what is given, counted, stopped and gone on with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from zeroweave import CheckpointError, ConfigError, EngineError
from zeroweave.data import GlobalBatchSampler

SAMPLES = 53


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class World:
    """The ranks of a run, each with its sampler and loader, which take their steps together."""

    def __init__(self, world: int, whole: int = 8, workers: int = 0, **options: Any) -> None:
        self.samplers = [GlobalBatchSampler(Numbers(), whole // world, r, world, **options) for r in range(world)]
        self.loaders = [DataLoader(Numbers(), batch_sampler=s, num_workers=workers) for s in self.samplers]

    def steps(self) -> Iterator[list[int]]:
        """The global batches from here to the end of the epoch."""
        loops = [s.counted(loader) for s, loader in zip(self.samplers, self.loaders, strict=True)]
        for batches in zip(*loops, strict=True):
            yield [index for batch in batches for index in batch.tolist()]

    def take(self, steps: int) -> list[list[int]]:
        """As many global batches, over the ends of epochs."""
        found: list[list[int]] = []
        while len(found) < steps:
            for batch in self.steps():
                found.append(batch)
                if len(found) == steps:
                    break
        return found

    def state(self) -> dict[str, Any]:
        first, *others = (sampler.state_dict() for sampler in self.samplers)
        assert all(other == first for other in others), "the position is not one for all"
        return first

    def resume(self, state: dict[str, Any]) -> None:
        for sampler in self.samplers:
            sampler.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_at_other_worlds_in_the_middle_of_an_epoch(workers: int) -> None:
    """2, then 4, then 1 rank: the same samples in each step as without a stop, over the end of an epoch."""
    expected, found, state = World(2, drop_last=True).take(14), [], World(2).state()
    for world, steps in ((2, 2), (4, 3), (1, 9)):
        run = World(world, workers=workers, drop_last=True)
        run.resume(state)
        found += run.take(steps)
        state = run.state()
    assert found == expected
    assert (state["epoch"], state["position"]) == (2, 16)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_epoch_has_every_sample(world: int) -> None:
    """The last batch is smaller; where ranks do not share it evenly, the epoch's first samples come again."""
    run = World(world)
    batches = list(run.steps())
    given = [index for batch in batches for index in batch]
    assert len(batches) == len(run.samplers[0]) == 7 and sorted(set(given)) == list(range(SAMPLES))
    assert given[SAMPLES:] == given[: -SAMPLES % world]
    assert list(run.steps()) != batches, "another epoch has another order"


def test_drop_last_leaves_out_what_is_no_global_batch() -> None:
    run = World(2, drop_last=True)
    batches = list(run.steps())
    assert len(batches) == len(run.samplers[0]) == 6 and all(len(batch) == 8 for batch in batches)
    assert (run.state()["epoch"], run.state()["position"]) == (1, 0)


def test_fewer_samples_than_ranks() -> None:
    samplers = [GlobalBatchSampler(2, 4, rank, 5) for rank in range(5)]
    (order,) = GlobalBatchSampler(2, 2, 0, 1)
    assert [list(sampler) for sampler in samplers] == [[[order[i % 2]]] for i in range(5)]
    assert list(GlobalBatchSampler(0, 4, 0, 2)) == []


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert list(World(2, shuffle=False).steps())[:2] == [list(range(8)), list(range(8, 16))]


def test_another_global_batch_size_goes_on_in_the_same_order() -> None:
    run, whole = World(2), [index for batch in World(2).steps() for index in batch]
    given = [index for batch in run.take(3) for index in batch]
    other = World(4, whole=12)
    other.resume(run.state())
    given += [index for batch in other.steps() for index in batch]
    assert given[:SAMPLES] == whole[:SAMPLES]


def test_the_position_is_what_the_loop_was_given() -> None:
    """A loader with workers has taken more batches from its sampler by then."""
    sampler = GlobalBatchSampler(Numbers(), 4, 0, 1, shuffle=False)
    loop = sampler.counted(DataLoader(Numbers(), batch_sampler=sampler, num_workers=2, prefetch_factor=3))
    assert next(loop).tolist() == [0, 1, 2, 3]
    assert sampler.position == 4 and sampler.state_dict()["position"] == 4


def test_the_end_of_the_last_batch_is_not_yet_the_next_epoch() -> None:
    """So that a program which stops there goes on with what it does at the end of an epoch."""
    run = World(1)
    for _ in run.steps():
        state = run.state()
    assert (state["epoch"], state["position"]) == (0, SAMPLES) and run.state()["epoch"] == 1
    again = World(2)
    again.resume(state)
    assert list(again.steps()) == [] and again.state()["epoch"] == 1


def test_set_epoch_keeps_the_position_in_the_same_epoch() -> None:
    run = World(1)
    run.take(2)
    (sampler,) = run.samplers
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.position) == (0, 16)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.position) == (3, 0)


@pytest.mark.oldest
def test_a_loop_draws_no_random_number() -> None:
    """DataLoaders draw a seed whenever they begin, which a resumed run does once more than another."""
    before = torch.get_rng_state()
    run = World(1)
    run.take(9)
    assert torch.equal(torch.get_rng_state(), before)
    assert World(1, seed=1).take(1) != World(1).take(1)


def test_a_sampler_gives_lists_to_datasets_that_take_them() -> None:
    sampler = GlobalBatchSampler(SAMPLES, 4, 1, 2, shuffle=False)
    tensors = torch.arange(SAMPLES)
    loader = DataLoader(tensors, sampler=sampler, batch_size=None)  # type: ignore[arg-type]
    assert next(iter(sampler.counted(loader))).tolist() == [4, 5, 6, 7]


def test_what_nobody_counts_is_not_saved() -> None:
    sampler = GlobalBatchSampler(Numbers(), 4, 0, 1)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    state = sampler.state_dict()
    next(iter(loader))
    with pytest.raises(EngineError, match=re.escape("sampler.counted(loader)")):
        sampler.state_dict()
    sampler.load_state_dict(state)
    next(sampler.counted(loader))
    assert sampler.state_dict()["position"] == 4


def test_loops_that_cannot_be_counted_are_refused() -> None:
    sampler = GlobalBatchSampler(Numbers(), 4, 0, 1)
    with pytest.raises(EngineError, match="does not take its batches from this sampler"):
        next(sampler.counted(DataLoader(Numbers(), sampler=sampler, batch_size=2)))
    unordered = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, in_order=False)
    with pytest.raises(EngineError, match="in_order"):
        next(sampler.counted(unordered))
    with pytest.raises(EngineError, match="more batches"):
        list(sampler.counted(range(SAMPLES)))
    with pytest.raises(EngineError, match="fewer batches"):
        list(GlobalBatchSampler(SAMPLES, 4, 0, 1).counted([1]))


def test_a_loop_ends_when_the_sampler_is_moved() -> None:
    sampler = GlobalBatchSampler(Numbers(), 4, 0, 1)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    loop, state = sampler.counted(loader), sampler.state_dict()
    next(loop)
    sampler.load_state_dict(state)
    with pytest.raises(EngineError, match="moved"):
        next(loop)
    assert sampler.position == 0
    assert len(list(sampler.counted(loader))) == len(sampler)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 7}, "7 samples, and this one has 53"),
        ({"order": None}, "shuffle=False"),
        ({"order": "0" * 32}, "another version of PyTorch"),
        ({"more": 1}, "no position of a GlobalBatchSampler: more"),
        ({"position": -5}, "no position of a GlobalBatchSampler: position"),
        ({"position": "x"}, "no position of a GlobalBatchSampler: position"),
        ({"position": None}, "no position of a GlobalBatchSampler: position"),
        ({"position": 10**6}, "lies behind the last of"),
        ({"epoch": "x"}, "no position of a GlobalBatchSampler: epoch"),
    ],
)
def test_the_position_of_other_data_is_refused(change: dict[str, Any], words: str) -> None:
    sampler = GlobalBatchSampler(SAMPLES, 4, 0, 1)
    state = sampler.state_dict() | {"epoch": 5}
    with pytest.raises(CheckpointError, match=words):
        sampler.load_state_dict(state | change)
    assert sampler.epoch == 0 and next(iter(sampler)) == next(iter(GlobalBatchSampler(SAMPLES, 4, 0, 1)))


def test_a_resumed_run_goes_on_with_its_seed() -> None:
    run, other = World(1, seed=3), World(1, seed=4)
    run.take(2)
    other.resume(run.state())
    assert other.take(9) == run.take(9)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        GlobalBatchSampler(9, 0)
    with pytest.raises(ConfigError, match="no rank 2 among 2"):
        GlobalBatchSampler(9, 1, 2, 2)


def test_the_environment_tells_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = GlobalBatchSampler(9, 1)
    assert (sampler.rank, sampler.world) == (3, 4)
