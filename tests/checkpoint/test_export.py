"""Exported folders: as transformers has them, whole or not there."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zeroweave.checkpoint.export import export
from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import write_file
from zeroweave.checkpoint.writer import words
from zeroweave.errors import CheckpointError

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
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt in (write, lambda path: write_file(path, bytes(40_000))):
        path = tmp_path / f"file{len(list(tmp_path.iterdir()))}"
        if place == "write":  # the same as of a full disk, but for the error's number
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(OSError) as caught:
                attempt(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert words(caught.value).endswith(f": {path}")
