"""A checkpoint is read: by any number of ranks, each the elements that it needs, once every byte has been checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Self

import torch

from zeroweave.checkpoint.files import FileReader
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import DTYPES, Manifest
from zeroweave.errors import CheckpointError
from zeroweave.ranks.control import Control


class Reader:
    """The tensors of a checkpoint, whose files are open from the first piece that is read. A context."""

    def __init__(self, manifest: Manifest, folder: Folder) -> None:
        self.manifest = manifest
        self._path = folder.path / manifest.tag
        self._files: dict[str, FileReader] = {}

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor that is there."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, in host memory. They must be there.

        OSError where a file has gone since it was checked.
        """
        out = torch.empty(numel, dtype=self.dtype(name), device="cpu")
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
        """Looks at all files, and reads these whole; what is wrong with them, in words."""
        found = []
        for name in self.manifest.files:
            try:
                with closing(self._open(name)) as file:
                    if name in files:
                        file.check()
            except (CheckpointError, OSError) as error:
                found.append(str(error))
        return found

    def _file(self, name: str) -> FileReader:
        if name not in self._files:
            try:
                self._files[name] = self._open(name)
            except CheckpointError as error:
                raise OSError(f"since it was checked: {error}") from None
        return self._files[name]

    def _open(self, name: str) -> FileReader:
        return FileReader(self._path / name, self.manifest.files[name])

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
    chosen = _choose(folder, tag) if control.rank == 0 else None
    tag, checksum, failure = control.broadcast_object(chosen, label="which checkpoint is loaded")
    if failure:
        raise CheckpointError(failure)
    assert tag is not None
    reader, problems = _look(folder, tag, checksum, control)
    if told := told_by(control.all_gather_object(problems, "the files of a checkpoint")):
        raise CheckpointError(
            f"the checkpoint {tag!r} in {folder.path} cannot be loaded: {'; '.join(told)}; {folder.choices(tag)}"
        )
    assert reader is not None
    with reader:
        yield reader


def _choose(folder: Folder, tag: str | None) -> tuple[str, str, str]:
    """Tag and checksum of the checkpoint to be loaded; or why there is none."""
    try:
        found = folder.manifest(tag)
    except CheckpointError as error:
        return "", "", str(error)
    return found.tag, found.checksum, ""


def _look(folder: Folder, tag: str, checksum: str, control: Control) -> tuple[Reader | None, list[str]]:
    """What this rank sees of a checkpoint, and what is wrong with that. It reads its share of the files whole."""
    try:
        reader = Reader(folder.manifest(tag, checksum), folder)
    except CheckpointError as error:
        return None, [str(error)]
    return reader, reader.check(sorted(reader.manifest.files)[control.rank :: control.world])


def told_by(ranks: Sequence[Sequence[str]]) -> list[str]:
    """What ranks tell, each once, with those that tell it where it is not all."""
    told = []
    for line in dict.fromkeys(line for theirs in ranks for line in theirs):
        of = [rank for rank, theirs in enumerate(ranks) if line in theirs]
        told.append(line if len(of) == len(ranks) else f"{line} (rank {', '.join(map(str, of))})")
    return told
