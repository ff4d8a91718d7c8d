"""Checkpoints are written whole, or not at all: what one rank does of it; and so are exported folders."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.small import ALONE, is_whole, read, write
from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import Folder, write_file
from zeroweave.checkpoint.writer import Content, Saving, words
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


TENSORS = {
    "a.weight": torch.randn(8, 4),
    "a.bias": torch.zeros(0),
    "b.weight": torch.randn(5).bfloat16(),
    "b.scale": torch.tensor(2.0),
    "c.weight": torch.randn(64, 4),
}


def export_to(path: Path, shard_bytes: int, finish: bool = True) -> None:
    def end(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if not finish:
            raise OSError(28, "No space left on device", str(folder))

    parts = [Part.of(name, value) for name, value in TENSORS.items()]
    export(path, parts, iter(TENSORS.values()), shard_bytes, end)


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (200, 2), (130, 3), (1, 5)])
def test_files_and_index(tmp_path: Path, shard_bytes: int, files: int) -> None:
    path = tmp_path / "deep" / "model"
    export_to(path, shard_bytes)
    found = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    assert len(found) == files
    tensors = {name: value for one in found.values() for name, value in one.items()}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert all(tensors[name].dtype == value.dtype for name, value in TENSORS.items())
    index = path / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        told = json.loads(index.read_text())
        assert told["weight_map"] == {name: file for file, one in found.items() for name in one}
        assert told["metadata"]["total_size"] == sum(value.nbytes for value in TENSORS.values())
    else:
        assert found.keys() == {"model.safetensors"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["model"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield TENSORS["a.weight"]
        raise OSError(28, "No space left on device")

    parts = [Part.of(name, value) for name, value in TENSORS.items()]
    with pytest.raises(OSError, match="No space"):
        export(tmp_path / "model", parts, broken(), 100, lambda folder: None)
    with pytest.raises(OSError, match="No space"):
        export_to(tmp_path / "model", 100, finish=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_place_that_is_taken(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is there already"):
        export_to(path, 100)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("place", ["write", "fsync"])
def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def write(path: Path) -> None:
        with FileWriter(path, [Part.of("a", torch.ones(10_000))]) as file:
            file.write(torch.ones(10_000))

    if place == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    for attempt in (write, lambda path: write_file(path, bytes(40_000))):
        path = tmp_path / f"file{len(list(tmp_path.iterdir()))}"
        # A limit is as a full disk, but for the error's number.
        with files_end_at(10_000) if place == "write" else nullcontext(), pytest.raises(OSError) as caught:
            attempt(path)
        assert words(caught.value).endswith(f": {path}")
