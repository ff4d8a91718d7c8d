"""A checkpoint is read: by any number of ranks, each the elements that it needs, once every byte has been checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Self

import torch

from zeroweave.checkpoint.files import FileReader
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import DTYPES, Manifest, parse
from zeroweave.errors import CheckpointError
from zeroweave.ranks.control import Control


class Reader:
    """The tensors of a checkpoint, whose files are open. A context."""

    def __init__(self, manifest: Manifest, folder: Folder) -> None:
        self.manifest = manifest
        self._path = folder.path / manifest.tag
        self._files: dict[str, FileReader] = {}

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor that is there."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, in host memory. They must be there."""
        out = torch.empty(numel, dtype=self.dtype(name))
        for piece in self.manifest.tensors[name].pieces:
            first, last = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if first < last:
                begin = piece.begin + (first - piece.start) * out.itemsize
                self._file(piece.file).read(begin, out[first - start : last - start])
        return out

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor, in its shape."""
        entry = self.manifest.tensors[name]
        return self.read(name, 0, entry.numel).view(entry.shape)

    def check(self, files: Collection[str]) -> list[str]:
        """Reads these files whole; what is wrong with them, in words."""
        found = []
        for name in files:
            try:
                self._file(name).check()
            except (CheckpointError, OSError) as error:
                found.append(str(error))
        return found

    def _file(self, name: str) -> FileReader:
        if name not in self._files:
            self._files[name] = FileReader(self._path / name, self.manifest.files[name])
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()


@contextmanager
def opened(folder: Folder, tag: str | None, control: Control) -> Iterator[Reader]:
    """The checkpoint `tag` of the folder (None: the latest), once the ranks have read all of its bytes between them.

    Collective; rank 0's `tag` counts. CheckpointError on all ranks, which says what is broken and names the other
    checkpoints.
    """
    found: tuple[bytes, str] = b"", ""
    if control.rank == 0:
        try:
            found = folder.manifest(tag).sealed(), ""
        except CheckpointError as error:
            found = b"", str(error)
    content, failure = control.broadcast_object(found, label="the manifest of a checkpoint")
    if failure:
        raise CheckpointError(failure)
    with Reader(parse(content), folder) as reader:
        names = sorted(reader.manifest.files)
        mine = reader.check(names[control.rank :: control.world])
        told = control.all_gather_object(mine, "the files of a checkpoint")
        if problems := [problem for one in told for problem in one]:
            raise CheckpointError(
                f"the checkpoint {reader.manifest.tag!r} in {folder.path} is broken: {'; '.join(problems)}; "
                f"{folder.choices(reader.manifest.tag)}"
            )
        yield reader
