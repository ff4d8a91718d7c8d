"""A checkpoint is written by a thread: what the rest of the process may do meanwhile."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint.small import ALONE, read
from zeroweave.checkpoint.async_save import AsyncSave
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.writer import Content, Saving
from zeroweave.errors import CheckpointError
from zeroweave.runtime.executor import Staging
from zeroweave.runtime.transfers import Snapshot, Transfers

VALUES = {"first": torch.arange(5.0), "second": torch.arange(7.0)}


def taken(tensors: list[torch.Tensor]) -> Snapshot:
    return Transfers(torch.device("cpu")).snapshot(tensors)


class Save:
    """An asynchronous save by one rank, which has written one tensor, and waits to be let `go`."""

    def __init__(self, path: Path) -> None:
        self.path, self.staging = path, Staging()
        self.values = {name: value.clone() for name, value in VALUES.items()}
        self.snapshots = {n: taken([value]) for n, value in enumerate(self.values.values())}
        self.go, self._waits = threading.Event(), threading.Event()
        self.saving = Saving(Folder(path), "a", 0, 1, self._content, ALONE, None)
        self.background = AsyncSave(self.saving, self.staging, ALONE, f"{path}/a")
        self._waits.wait()

    def _content(self) -> Content:
        return Content([Part.of(*each) for each in self.values.items()], self._tensors(), {}, self.snapshots)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.snapshots[0].read()
        self._waits.set()
        self.go.wait()
        yield from self.snapshots[1].read()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()

    def ends_well(self) -> bool:
        self.go.set()
        assert self.background.advance(wait=True)
        found, _ = read(self.path)
        names = sorted(path.name for path in self.path.iterdir())
        return names == ["a", "latest"] and all(torch.equal(found[name], value) for name, value in VALUES.items())


def test_a_forked_child_that_ends_leaves_the_save_alone(tmp_path: Path) -> None:
    with Save(tmp_path) as save:
        if (child := os.fork()) == 0:
            del save.background  # as the end of its program does
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(tmp_path.glob(".a.partial/rank-00000.safetensors"))) == 1
        assert save.ends_well()


@pytest.mark.parametrize("name", list(VALUES))
@pytest.mark.parametrize("updated", [False, True])
def test_what_is_written_without_a_word_is_a_failure(tmp_path: Path, name: str, updated: bool) -> None:
    """Whether the thread has read it or not, and whether a step follows or not."""
    with Save(tmp_path) as save, warnings.catch_warnings():
        warnings.simplefilter("error")
        save.values[name].zero_()
        if updated:
            save.staging.arrive_all()
        save.go.set()
        with pytest.raises(CheckpointError, match=r"rank 0: .*not by the engine: write them with engine.set_full"):
            save.background.advance(wait=True)
        del save.background
    assert not list(tmp_path.iterdir())


def test_what_is_stopped_tells_of_nothing_that_follows_from_that(tmp_path: Path) -> None:
    with Save(tmp_path) as save:
        save.saving.stop()
        save.go.set()
        with pytest.warns(UserWarning, match="a was not finished"):
            del save.background
        assert not save.saving.failed and not list(tmp_path.iterdir())


def test_buckets_that_no_step_stages_are_copied_at_its_end(tmp_path: Path) -> None:
    begun = threading.Event()

    class Waiting(Snapshot):
        def start(self) -> None:
            begun.set()

    with Save(tmp_path) as save:
        save.staging.begin({0: Waiting([], Transfers(torch.device("cpu")).snapshot([])._copies)})
        assert not save.background.advance(wait=False) and begun.is_set()
        assert save.ends_well()
