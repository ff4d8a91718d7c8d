"""Checkpoints are written whole, or not at all: what one rank does of it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.checkpoint.small import ALONE, is_whole, read, write
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.writer import Content, Saving
from zeroweave.errors import CheckpointError

LARGE = torch.arange(1 << 16, dtype=torch.float32)


def content() -> Content:
    return Content([Part.of("large", LARGE)], [LARGE], {})


def save_to(path: Path, tag: str = "two", make: Callable[[], Content] = content) -> None:
    Saving(Folder(path), tag, 2, 1, make, ALONE, None).finish()


def is_as_before(path: Path) -> bool:
    return sorted(p.name for p in path.iterdir()) == ["latest", "one"] and is_whole(path, None, 1)


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """Inside, no file of this process gets longer: a full disk for its files alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1000, 1 << 17, 1 << 18])
def test_a_disk_that_is_full_at_any_byte(path: Path, nbytes: int) -> None:
    with files_end_at(nbytes), pytest.raises(CheckpointError, match=r"'two' was not written.*rank 0: File too large"):
        save_to(path)
    assert is_as_before(path)
    save_to(path)
    assert torch.equal(read(path)[0]["large"], LARGE) and is_whole(path, "one", 1)


def test_a_manifest_that_finds_no_room(path: Path) -> None:
    values = {"long": "x" * 1000}
    small = Content([], [], values)
    with files_end_at(500), pytest.raises(CheckpointError, match="File too large"):
        save_to(path, make=lambda: small)
    assert is_as_before(path)


@contextmanager
def not_as_root() -> Iterator[None]:
    """Root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)


def test_a_folder_that_may_only_be_read() -> None:
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        os.chmod(made, 0o755)
        path = Path(made) / "runs"
        write(path, "one", 1, seed=1)
        path.chmod(0o555)
        with not_as_root(), pytest.raises(CheckpointError, match=r"'two' cannot be written to .*Permission denied"):
            save_to(path)
        with not_as_root():
            assert is_as_before(path)
        path.chmod(0o755)


@pytest.mark.parametrize("place", ["file", "/proc/zeroweave", "file/deep"])
def test_a_place_that_cannot_be_a_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="'two' cannot be written to"):
        save_to(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_made_is_told_with_its_cause(path: Path) -> None:
    def make() -> Content:
        raise ZeroDivisionError("there is none")

    with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError: there is none") as caught:
        save_to(path, make=make)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert is_as_before(path)


class Stuck(Folder):
    """From which nothing can be removed."""

    def prune(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        raise PermissionError(13, "Permission denied", "one")


def test_old_ones_that_stay_are_no_failure(path: Path) -> None:
    with pytest.warns(UserWarning, match="were not removed: Permission denied: one"):
        Saving(Stuck(path), "two", 2, 1, content, ALONE, (1, None)).finish()
    assert Folder(path).latest()[0] == "two"
