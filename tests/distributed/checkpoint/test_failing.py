"""Disks that are full, files that are broken and folders that are not shared, on one rank: all ranks are told."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import zeroweave as zw
from tests.distributed.checkpoint.runs import differing, everything, make, train
from tests.support.harness import Pools
from tests.support.marks import daily


@contextmanager
def files_end_at(nbytes: int | None) -> Iterator[None]:
    """Inside, no file of this process gets longer: what a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if nbytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full(folder: Path, stage: int, rank: int, nbytes: int) -> list[str]:
    """A save fails on one rank; training goes on, and the checkpoint before is as it was."""
    with make("noisy", "adamw", stage, "eager", 0) as engine:
        train(engine, 2)
        engine.save(folder, "one")
        saved = everything(engine)
        names = sorted(p.name for p in folder.rglob("*"))
        losses = train(engine, 1)
        with files_end_at(nbytes if engine.rank == rank else None):
            with pytest.raises(
                zw.CheckpointError, match=f"'two' was not written to .*: rank {rank}: File too large"
            ) as caught:
                engine.save(folder, "two")
        assert not hasattr(caught.value, "__notes__")
        assert sorted(p.name for p in folder.rglob("*")) == names
        run = {"losses": losses + train(engine, 1), "end": everything(engine)}
        engine.load(folder)
        found = differing(saved, everything(engine), "loaded")
        found += differing(run, {"losses": train(engine, 2), "end": everything(engine)}, "again")
        engine.save(folder, "two")
        return found


@daily(
    ("stage", "rank", "nbytes"),
    [(3, 1, 500)],
    [(stage, rank, nbytes) for stage in (1, 2, 3) for rank in (0, 1) for nbytes in (0, 500, 3000)],
)
def test_a_disk_that_is_full_on_one_rank(pools: Pools, tmp_path: Path, stage: int, rank: int, nbytes: int) -> None:
    assert pools(2).run(full, tmp_path, stage, rank, nbytes) == [[], []]


def unshared(folder: Path, mine: str) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        train(engine, 1)
        before = everything(engine)
        os.chdir(folder / mine.format(engine.rank))
        with pytest.raises(zw.CheckpointError, match=r"rank 1: there is no runs/.*which rank 0 has made"):
            engine.save("runs", "a")
        assert not list((folder / "0" / "runs").iterdir()) and not (folder / "1" / "runs").exists()
        if engine.rank == 0:
            os.chdir(folder / "1")
        engine.save("runs", "a")
        os.chdir(folder / mine.format(engine.rank))
        with pytest.raises(zw.CheckpointError):
            engine.load("runs")
        if engine.rank == 0:
            os.rename(folder / "1" / "runs" / "a", folder / "0" / "runs" / "a")
            os.rename(folder / "1" / "runs" / "latest", folder / "0" / "runs" / "latest")
        with pytest.raises(zw.CheckpointError, match=r"'a' .*manifest.json cannot be read.* \(rank 1\)"):
            engine.load("runs")
        os.chdir(folder)
        assert differing(before, everything(engine)) == []
        engine.load(folder / "0" / "runs")
        train(engine, 1)


def test_a_folder_that_one_rank_does_not_see(pools: Pools, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pools(2).run(unshared, tmp_path, "{}")


def save(folder: Path) -> None:
    with make("plain", "adamw", 3, "eager", 0) as engine:
        engine.save(folder, "one")
        train(engine, 1)
        engine.save(folder, "two")


def broken(folder: Path, name: str) -> None:
    with make("plain", "adamw", 1, "eager", 1) as engine:
        train(engine, 1)
        before = everything(engine)
        for _ in range(2):
            with pytest.raises(zw.CheckpointError, match=f"'two' in .*{name} is damaged.*by its tag: one") as caught:
                engine.load(folder)
            assert not hasattr(caught.value, "__notes__")
        assert differing(before, everything(engine)) == []
        train(engine, 1)
        engine.load(folder, "one")
        assert engine.global_steps == 0


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors"])
def test_a_broken_file_is_told_to_all_ranks(pools: Pools, tmp_path: Path, name: str) -> None:
    """By the rank that has read it, which may be another one than the one that wrote it."""
    pools(3).run(save, tmp_path)
    file = tmp_path / "two" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    pools(2).run(broken, tmp_path, name)


def pruned(folder: Path) -> list[str]:
    with make("plain", "adamw", 3, "eager", 0, checkpoint={"keep_last": 2, "keep_every": 4}) as engine:
        for _ in range(7):
            train(engine, 1)
            engine.save(folder)
        return sorted(p.name for p in folder.iterdir())


def test_old_ones_are_removed(pools: Pools, tmp_path: Path) -> None:
    names = [*(f"step-{step:08d}" for step in (4, 6, 7))]
    assert pools(2).run(pruned, tmp_path)[0] == ["latest", *names]
