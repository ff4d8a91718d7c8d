"""A small checkpoint of two ranks, written without processes, and what is done to it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES, Entry, Manifest, Piece
from zeroweave.checkpoint.reader import opened
from zeroweave.ranks.control import Control

ALONE = Control()
OF_FOLDERS = ("zeroweave.checkpoint.folder", "zeroweave.checkpoint.staging")
"""Modules, between whose lines processes die."""
SHARED = 7
"""Elements of the tensor that both ranks have a part of; the first rank has 3."""

Values = dict[str, torch.Tensor]


def tensors_of(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return {
        "shared": torch.randn(SHARED, generator=generator),
        "first": torch.randn(2, 3, generator=generator).bfloat16(),
        "second": torch.randint(100, (5,), generator=generator),
        "empty": torch.empty(0, 4),
    }


def manifest_of(path: Path, tag: str, step: int, seed: int) -> Manifest:
    """The manifest of a checkpoint whose files are written to the folder `path`."""
    values = tensors_of(seed)
    parts = [
        [Part("shared", (SHARED,), torch.float32, 0, 3), Part.of("first", values["first"])],
        [Part("shared", (SHARED,), torch.float32, 3, SHARED - 3), Part.of("second", values["second"])],
    ]
    pieces: dict[str, list[Piece]] = {name: [] for name in values}
    files = {}
    for rank, mine in enumerate(parts):
        name = f"rank-{rank:05d}.safetensors"
        with FileWriter(path / name, mine) as file:
            for part in mine:
                file.write(values[part.name].reshape(-1)[part.start : part.start + part.numel])
                begin = file.begins[part.name]
                pieces[part.name].append(Piece(file=name, begin=begin, start=part.start, numel=part.numel))
        files[name] = file.written
    return Manifest(
        tag=tag,
        step=step,
        world=len(parts),
        stage=3,
        files=files,
        tensors={
            name: Entry(shape=tuple(value.shape), dtype=NAMES[value.dtype], pieces=tuple(pieces[name]))
            for name, value in values.items()
        },
        values={"client": plain.encode({"seed": seed}, "client")},
    )


def write(path: Path, tag: str, step: int, seed: int) -> None:
    """A checkpoint in the folder `path`, which becomes its latest."""
    folder = Folder(path)
    partial = folder.begin(tag)
    folder.publish(partial, manifest_of(partial.path, tag, step, seed))


def read(path: Path, tag: str | None = None) -> tuple[Values, Any]:
    """All of a checkpoint."""
    with opened(Folder(path), tag, ALONE) as reader:
        return {name: reader.whole(name) for name in reader.manifest.tensors}, reader.manifest.values


def is_whole(path: Path, tag: str | None, seed: int) -> bool:
    """Can it be read, and is it that of the seed, bit for bit?"""
    tensors, values = read(path, tag)
    expected = tensors_of(seed)
    return (
        tensors.keys() == expected.keys()
        and all(torch.equal(tensors[name], value) for name, value in expected.items())
        and plain.decode(values["client"]) == {"seed": seed}
    )


def sealed(text: bytes) -> bytes:
    """A manifest of any content behind its checksum, which is right: `text` goes on behind the checksum's digits."""
    zeros = b'{"checksum":"' + b"0" * 32
    return b'{"checksum":"' + xxhash.xxh3_128_hexdigest(zeros + text).encode() + text


def lying(manifest: Manifest, changes: Mapping[str, Any]) -> bytes:
    """The manifest with other fields, of whatever JSON, under a right checksum."""
    fields = {key: value for key, value in manifest.model_dump(mode="json").items() if key != "checksum"}
    return sealed(b'",' + json.dumps({**fields, **changes}).encode()[1:])


class Runs:
    """Leaves a file when it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def ended_in(action: Callable[[], object], is_last: Callable[[], bool]) -> bool:
    """Runs `action` in a process that ends without a word as soon as `is_last`, asked before each line of `OF_FOLDERS`.

    Did it end before `action` was over?
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17

    def look(frame: Any, event: str, _: object) -> Any:
        if frame.f_globals.get("__name__") in OF_FOLDERS:
            if event == "line" and is_last():
                os._exit(17)
            return look
        return None

    sys.settrace(look)
    try:
        action()
    finally:
        os._exit(0)
