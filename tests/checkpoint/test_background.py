"""A checkpoint is written by a thread: what the rest of the process may do meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.checkpoint.small import ALONE, read
from zeroweave.checkpoint.background import Background
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.writer import Content, Saving
from zeroweave.runtime.executor import Staging

VALUES = {"first": torch.arange(5.0), "second": torch.arange(7.0)}


class Save:
    """An asynchronous save by one rank, which has written one tensor, and waits to be let `go`."""

    def __init__(self, path: Path) -> None:
        self.path, self.staging = path, Staging()
        self.go, self._waits = threading.Event(), threading.Event()
        saving = Saving(Folder(path), "a", 0, 1, self._content, ALONE, None)
        self.background = Background(saving, self.staging, ALONE, f"{path}/a")
        self._waits.wait()

    def _content(self) -> Content:
        return Content([Part.of(name, value) for name, value in VALUES.items()], self._tensors(), {})

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield VALUES["first"]
        self._waits.set()
        self.go.wait()
        yield VALUES["second"]

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()

    def ends_well(self) -> bool:
        self.go.set()
        self.background.finish()
        found, _ = read(self.path)
        names = sorted(path.name for path in self.path.iterdir())
        return names == ["a", "latest"] and all(torch.equal(found[name], value) for name, value in VALUES.items())


def test_a_forked_child_that_ends_leaves_the_save_alone(tmp_path: Path) -> None:
    with Save(tmp_path) as save:
        if (child := os.fork()) == 0:
            del save.background  # as the end of its program does
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(tmp_path.glob(".a.*.partial/rank-00000.safetensors"))) == 1
        assert save.ends_well()
