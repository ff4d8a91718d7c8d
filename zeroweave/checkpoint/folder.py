"""A folder of checkpoints: one folder each, by tag, and `latest`, which names the one to continue from.

    DIR/latest                       {"tag":"step-00000200","manifest":"<its checksum>"}
    DIR/step-00000200/manifest.json  see `manifest`
    DIR/step-00000200/rank-00000.safetensors …
    DIR/.step-00000300.partial       what is being written, see `staging`

A checkpoint is written next to its place and renamed when all of it is on the disk, `latest` after that. So what is
there under a tag is whole, and a run that dies at any moment leaves what was there before.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from zeroweave.checkpoint import manifest as manifests
from zeroweave.checkpoint.files import naming, open_file
from zeroweave.checkpoint.manifest import Manifest
from zeroweave.checkpoint.staging import StagingFolder, remove, sweep
from zeroweave.errors import CheckpointError
from zeroweave.notices import warn

LATEST: Final = "latest"
_TAG: Final = re.compile(manifests.PLAIN_NAME)


def check_tag(tag: str) -> None:
    """CheckpointError for what cannot be the name of a checkpoint."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"[ZW604] {tag!r} cannot be a checkpoint's tag: letters, digits, '.', '_' and '-', a letter or digit "
            f"first, at most 128 of them, and not {LATEST!r}"
        )


class Folder:
    """The checkpoints in one folder. Everything here is local; one rank writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # ------------------------------------------------------------------ writing
    def begin(self, tag: str, again: bool = False) -> StagingFolder:
        """A new folder for the files of a checkpoint that is to have this tag, which must be free.

        `again`: where it is taken it becomes one like it. A run that resumes from an older checkpoint comes to the same
        steps again, and another run may save here. The folder is to be published or discarded, and no other saver gets
        the tag until then. What savers that have ended have left here is removed first.
        """
        check_tag(tag)
        self.path.mkdir(parents=True, exist_ok=True)
        if stuck := sweep(self.path):
            warn(f"what is left in {self.path} of saves that were killed cannot be removed: {', '.join(stuck)}", rank=0)
        for number in count(1):
            place = self.path / (tag if number == 1 else f"{tag}.{number}")
            state = "has a checkpoint {!r} already"
            if not os.path.lexists(place):
                try:
                    partial = StagingFolder(place)
                except FileExistsError:
                    state = "is being given a checkpoint {!r} by another saver"
                else:
                    if not os.path.lexists(place):  # since then
                        return partial
                    partial.discard()
            if not again:
                raise CheckpointError(f"[ZW604] {self.path} {state.format(tag)}: choose another tag, or remove it")
        raise AssertionError

    def publish(self, partial: StagingFolder, manifest: Manifest) -> None:
        """Gives what is in `partial` its tag, and makes it the latest.

        CheckpointError or OSError where that fails; then nothing has the tag, unless the disk fails at the very end.
        """
        content = manifest.sealed()
        latest = {"tag": manifest.tag, "manifest": manifests.parse(content).checksum}  # what is published can be read
        write_file(partial.path / manifests.NAME, content)
        write_file(partial.path / LATEST, json.dumps(latest, separators=(",", ":")).encode())
        sync(partial.path)
        place = self.path / manifest.tag
        try:
            partial.path.rename(place)
        except OSError as error:
            raise CheckpointError(f"[ZW605] {place} cannot be published: {error.strerror}") from None
        try:
            sync(self.path)
            (place / LATEST).replace(self.path / LATEST)
        except OSError:
            place.rename(partial.path)
            raise
        partial.release()
        sync(self.path)

    def prune(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        """Removes all checkpoints but the last ones and those of each `keep_every`-th step; returns their tags.

        The latest stays, and so does what cannot be read.
        """
        known = []
        for tag in self.tags():
            with suppress(CheckpointError):
                known.append((self.manifest(tag).step, tag))
        latest = self.latest()[0]
        old = [(step, tag) for step, tag in sorted(known, reverse=True)[keep_last:] if tag != latest]
        gone = [tag for step, tag in old if keep_every is None or step % keep_every]
        for tag in gone:
            remove(self.path / tag)
        return gone

    # ------------------------------------------------------------------ reading
    @property
    def empty(self) -> bool:
        """True if nothing has been saved here."""
        return not (self.tags() or os.path.lexists(self.path / LATEST))

    def tags(self) -> list[str]:
        """The tags of all checkpoints, sorted."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if _TAG.fullmatch(p.name) and (p / manifests.NAME).is_file())

    def latest(self) -> tuple[str, str]:
        """Tag and manifest's checksum of the latest checkpoint."""
        try:
            content = _read(self.path / LATEST, 4096)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.choices()}") from None
        try:
            told = json.loads(content)
            tag, checksum = told["tag"], told["manifest"]
            check_tag(tag)
            if len(told) != 2 or not re.fullmatch("[0-9a-f]{32}", checksum):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError, CheckpointError):
            raise CheckpointError(f"{self.path / LATEST} is damaged; {self.choices()}") from None
        return tag, checksum

    def manifest(self, tag: str | None = None, checksum: str | None = None) -> Manifest:
        """The manifest of a checkpoint; None: of the latest. `checksum`: what it must have."""
        which = ""
        if tag is None:
            which = f", which {LATEST!r} names"
            tag, checksum = self.latest()
        check_tag(tag)
        which = f"the checkpoint {tag!r} in {self.path}{which}"
        place = self.path / tag
        try:
            if place.is_symlink():
                raise CheckpointError(f"{place} is a symbolic link")
            found = manifests.parse(_read(place / manifests.NAME, manifests.LARGEST))
        except CheckpointError as error:
            raise CheckpointError(f"{which}: {error}; {self.choices(tag)}") from None
        if found.tag != tag or (checksum is not None and found.checksum != checksum):
            raise CheckpointError(f"{which}: {manifests.NAME} is that of another one; {self.choices(tag)}")
        return found

    def choices(self, other_than: str = "") -> str:
        """What else could be loaded, in words."""
        others = [tag for tag in self.tags() if tag != other_than]
        if not others:
            return "there is no other one"
        return f"load one of these by its tag: {', '.join(others[-8:])}"


def _read(path: Path, limit: int) -> bytes:
    fd, nbytes = open_file(path, str(path))
    with open(fd, "rb") as file:
        if nbytes > limit:
            raise CheckpointError(f"{path} has {nbytes} bytes, and {limit} at most can be read")
        try:
            return file.read(nbytes)
        except OSError as error:
            raise CheckpointError(f"[ZW601] {path} cannot be read: {error.strerror}") from None


def write_file(path: Path, content: bytes) -> None:
    """A new file, which is on the disk when this returns."""
    with naming(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """What has been made or renamed in a folder is on the disk when this returns."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
