"""A checkpoint is written: each rank its own file, and rank 0 the manifest. All of it or nothing, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroweave.checkpoint.files import FileWriter, Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES, Entry, File, Manifest, Piece
from zeroweave.checkpoint.staging import StagingFolder
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.notices import warn
from zeroweave.ranks.control import Control
from zeroweave.runtime.transfers import Snapshot


@dataclass(frozen=True)
class Content:
    """What one rank has to write.

    `parts`: what of which tensors; `tensors` gives them in this order, whole or in pieces, but for those without
    elements, and may make each when it is asked for. `values`: encoded, by name; names are distinct over the ranks.
    `snapshots`: where `tensors` takes them from, by bucket, if another thread asks.
    """

    parts: Sequence[Part]
    tensors: Iterable[torch.Tensor]
    values: Mapping[str, Any]
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)


class _Written(NamedTuple):
    """What a rank tells the others: its file, and which parts begin where in it; or what went wrong."""

    failure: str = ""
    name: str = ""
    file: File | None = None
    parts: Sequence[tuple[Part, int]] = ()
    values: Mapping[str, Any] = {}


class _Stopped(Exception):
    """The save was stopped."""


class Saving:
    """One checkpoint on its way to its folder. To be made on all ranks, which then call, in this order:

    write      each rank its file, in any thread
    exchange   collective: all have written
    publish    rank 0, in any thread: the manifest, and the folder gets its name; old checkpoints go
    end        collective: it is there

    Where something goes wrong on one rank, the next collective call raises CheckpointError on all ranks. Nothing is
    left then of what was written, and the checkpoints that there were are as before.
    """

    def __init__(
        self,
        folder: Folder,
        tag: str | None,
        step: int,
        stage: int,
        content: Callable[[], Content],
        control: Control,
        keep: tuple[int, int | None] | None,
    ) -> None:
        """Collective; rank 0's `tag` and `folder` count, which all ranks must see. `keep`: see `Folder.prune`.

        `tag`: None: the step's, or where that is taken one like it. CheckpointError, as above, where `content()` fails
        on one rank.
        """
        self._folder, self._step, self._stage = folder, step, stage
        self._control, self._keep = control, keep
        name = f"step-{step:08d}" if tag is None else tag
        self._partial, failure = _begin(folder, name, tag is None) if control.rank == 0 else (None, "")
        """rank 0's"""
        begun = (name, "") if self._partial is None else (self._partial.place.name, str(self._partial.path))
        with self._discarding():
            told = control.broadcast_object((*begun, failure), label="the folder of a checkpoint")
        self.tag, place, failure = told
        if failure:
            raise CheckpointError(f"[ZW605] the checkpoint {self.tag!r} cannot be written to {folder.path}: {failure}")
        self._place = Path(place)
        self._stopped = threading.Event()
        self._mine = self._published = _Written()
        """what `write` and `publish` have come to"""
        self.published = False
        """true if it is where it is looked for; rank 0 knows"""
        self._told: Sequence[_Written] = ()
        """by rank"""
        self._cause: Exception | None = None
        with self._discarding():
            self._content = self._prepared(content)

    @property
    def snapshots(self) -> Mapping[int, Snapshot]:
        """What must be read before buckets change, by bucket."""
        return self._content.snapshots

    @property
    def failed(self) -> bool:
        """True if something has gone wrong on this rank."""
        return bool(self._mine.failure or self._published.failure)

    def finish(self) -> None:
        """All of it, one after the other, here."""
        with self._discarding():
            self.write()
            self.exchange()
            self.publish()
            self.end()

    def write(self) -> None:
        """Writes this rank's file."""
        try:
            self._mine = self._write()
        except Exception as error:  # of any kind: the others wait to be told
            if not self._stopped.is_set():
                self._mine = self._failure(error)
        finally:
            self._drop()

    def exchange(self) -> None:
        """All ranks tell what they have written."""
        lost = [error for snapshot in self.snapshots.values() if (error := snapshot.lost()) is not None]
        if lost and not self.failed:
            self._mine = self._failure(lost[0])
        self._told = self._control.all_gather_object(self._mine, "what was written")
        self._raise(f"rank {rank}: {one.failure}" for rank, one in enumerate(self._told) if one.failure)

    def publish(self) -> None:
        """Rank 0 puts the checkpoint where it is looked for."""
        if self._partial is None:
            return
        try:
            self._folder.publish(self._partial, _manifest(self.tag, self._step, self._stage, self._told))
        except Exception as error:
            self._published = self._failure(error)
            return
        self.published = True
        try:  # the new checkpoint is there, so what goes wrong here is no reason to stop
            if self._keep is not None:
                self._folder.prune(*self._keep)
        except (OSError, CheckpointError) as error:
            warn(f"old checkpoints in {self._folder.path} were not removed: {words(error)}", rank=0)

    def end(self) -> None:
        """All ranks know that it is there."""
        failure = self._control.broadcast_object(self._published.failure, label="the end of a checkpoint")
        self._raise([f"rank 0: {failure}"] if failure else ())

    def stop(self) -> None:
        """What is being written in another thread ends soon and is discarded."""
        self._stopped.set()
        self._drop()

    def discard(self) -> None:
        """Removes what has been written and is not published. No thread writes any more."""
        if self._partial is not None:
            self._partial.discard()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Inside, an error leaves nothing."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def _prepared(self, content: Callable[[], Content]) -> Content:
        found, failure = Content((), (), {}), ""
        try:
            if not self._place.is_dir():
                raise CheckpointError(
                    f"[ZW605] there is no {self._place}, which rank 0 has made: checkpoints need a folder that all "
                    "ranks share"
                )
            found = content()
        except Exception as error:
            failure = self._failure(error).failure
        told = self._control.all_gather_object(failure, "the content of a checkpoint")
        self._raise(f"rank {rank}: {theirs}" for rank, theirs in enumerate(told) if theirs)
        return found

    def _write(self) -> _Written:
        name, mine = f"rank-{self._control.rank:05d}.safetensors", self._content
        written = [part for part in mine.parts if part.numel]
        with FileWriter(self._place / name, written) as file:
            for tensor in takewhile(lambda _: not self._stopped.is_set(), mine.tensors):
                file.write(tensor)
            if self._stopped.is_set():
                raise _Stopped  # and do not wait for the disk
        begins = [(part, file.begins.get(part.name, 0)) for part in mine.parts]
        return _Written(name=name, file=file.written, parts=begins, values=mine.values)

    def _drop(self) -> None:
        for snapshot in self.snapshots.values():
            snapshot.drop()

    def _failure(self, error: Exception) -> _Written:
        self._cause = error
        return _Written(words(error))

    def _raise(self, failures: Iterable[str]) -> None:
        """The end of it, where there are failures, which all ranks know."""
        if not (told := "; ".join(failures)):
            return
        self.discard()
        raise CheckpointError(
            f"[ZW605] the checkpoint {self.tag!r} was not written to {self._folder.path}: {told}"
        ) from self._cause


def _begin(folder: Folder, tag: str, again: bool) -> tuple[StagingFolder | None, str]:
    """The new folder; or why there is none, in words."""
    try:
        return folder.begin(tag, again), ""
    except (OSError, CheckpointError) as error:
        return None, words(error)


def _manifest(tag: str, step: int, stage: int, told: Sequence[_Written]) -> Manifest:
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, Part] = {}
    for one in told:
        for part, begin in one.parts:
            known = kinds.setdefault(part.name, part)
            if (known.shape, known.dtype) != (part.shape, part.dtype):
                raise CheckpointError(f"[ZW606] the ranks have different {part.name!r}")
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
