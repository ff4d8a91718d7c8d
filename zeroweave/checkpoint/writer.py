"""A checkpoint is written: each rank its own file, and rank 0 the manifest. All of it or nothing, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES, Entry, File, Manifest, Piece
from zeroweave.checkpoint.partial import Partial
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.notices import warn
from zeroweave.ranks.control import Control


@dataclass(frozen=True)
class Content:
    """What one rank has to write.

    `parts`: what of which tensors; `tensors` gives them in this order, but for those without elements, and may make
    each when it is asked for. `values`: encoded, by name; names are distinct over the ranks.
    """

    parts: Sequence[Part]
    tensors: Iterable[torch.Tensor]
    values: Mapping[str, Any]


class _Written(NamedTuple):
    """What a rank tells the others: its file, and which parts begin where in it; or what went wrong."""

    failure: str = ""
    name: str = ""
    file: File | None = None
    parts: Sequence[tuple[Part, int]] = ()
    values: Mapping[str, Any] = {}


def save(
    folder: Folder,
    tag: str,
    step: int,
    stage: int,
    content: Callable[[], Content],
    control: Control,
    keep: tuple[int, int | None] | None,
) -> None:
    """Writes the checkpoint `tag`. Collective; rank 0's `tag` and `folder` count, which all ranks must see.

    `keep`: see `Folder.prune`. CheckpointError on all ranks where one of them cannot write; nothing is left then of
    what was written, and the checkpoints that there were are as before.
    """
    with ExitStack() as after:
        partial, failure = _begin(folder, tag) if control.rank == 0 else (None, "")
        if partial is not None:
            after.callback(partial.discard)
        place = "" if partial is None else str(partial.path)
        place, failure = control.broadcast_object((place, failure), label="the folder of a checkpoint")
        if failure:
            raise CheckpointError(f"the checkpoint {tag!r} cannot be written to {folder.path}: {failure}")
        cause: Exception | None = None
        try:
            mine = _write(Path(place), content, control.rank)
        except Exception as error:  # whatever it is, the others wait to be told
            mine, cause = _Written(words(error)), error
        told = control.all_gather_object(mine, "what was written")
        failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(told) if one.failure]
        published = ""
        if partial is not None and not failures:
            try:
                folder.publish(partial, _manifest(tag, step, stage, told))
            except (OSError, CheckpointError) as error:
                published, cause = f"rank 0: {words(error)}", error
        failures += filter(None, [control.broadcast_object(published, label="the end of a checkpoint")])
    if failures:
        told_so = f"the checkpoint {tag!r} was not written to {folder.path}: {'; '.join(failures)}"
        raise CheckpointError(told_so) from cause
    if control.rank == 0 and keep is not None:
        _prune(folder, *keep)


def _prune(folder: Folder, keep_last: int, keep_every: int | None) -> None:
    """The new checkpoint is there, so what goes wrong here is no reason to stop."""
    try:
        folder.prune(keep_last, keep_every)
    except (OSError, CheckpointError) as error:
        warn(f"old checkpoints in {folder.path} were not removed: {words(error)}", rank=0)


def _begin(folder: Folder, tag: str) -> tuple[Partial | None, str]:
    """The new folder; or why there is none, in words."""
    try:
        return folder.begin(tag), ""
    except (OSError, CheckpointError) as error:
        return None, words(error)


def _write(place: Path, content: Callable[[], Content], rank: int) -> _Written:
    """This rank's file."""
    name = f"rank-{rank:05d}.safetensors"
    if not place.is_dir():
        raise CheckpointError(
            f"there is no {place}, which rank 0 has made: checkpoints need a folder that all ranks share"
        )
    mine = content()
    with FileWriter(place / name, [part for part in mine.parts if part.numel]) as file:
        for tensor in mine.tensors:
            file.write(tensor)
    begins = [(part, file.begins.get(part.name, 0)) for part in mine.parts]
    return _Written(name=name, file=file.written, parts=begins, values=mine.values)


def _manifest(tag: str, step: int, stage: int, told: Sequence[_Written]) -> Manifest:
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, Part] = {}
    for one in told:
        for part, begin in one.parts:
            known = kinds.setdefault(part.name, part)
            if (known.shape, known.dtype) != (part.shape, part.dtype):
                raise CheckpointError(f"the ranks have different {part.name!r}")
            mine = pieces.setdefault(part.name, [])
            if part.numel:
                mine.append(Piece(file=one.name, begin=begin, start=part.start, numel=part.numel))
    tensors = {
        name: Entry(
            shape=part.shape, dtype=NAMES[part.dtype], pieces=tuple(sorted(pieces[name], key=lambda piece: piece.start))
        )
        for name, part in kinds.items()
    }
    return Manifest(
        tag=tag,
        step=step,
        stage=stage,
        world=len(told),
        files={one.name: one.file for one in told if one.file is not None},
        tensors=tensors,
        values={name: value for one in told for name, value in one.values.items()},
    )


def words(error: Exception) -> str:
    """What went wrong, and with which file."""
    if isinstance(error, EngineError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
