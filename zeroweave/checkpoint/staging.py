"""Folders that are not whole: each is next to its place, and a lock tells whether its process still lives.

    DIR/.step-00000300.4f1c….partial   what is being written, or removed
    DIR/.step-00000300.4f1c….lock      empty, and locked (`flock`) from before the folder is there until it has gone
    DIR/.step-00000300.claim           a hard link to the lock of the one that is to have this tag

The system releases the locks of a process that has ended, however it has ended. So a process that gets such a lock
knows that no other one works on the folder any more. Each lock file has its own name, and only the holder of the lock
removes it: a name never comes to mean another file.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

_LOCK: Final = re.compile(r"\.(.+)\.[0-9a-f]{32}\.lock")


class StagingFolder:
    """A new folder next to `place`, at `path`. It is this process's until `release` or `discard`, one of which is due.

    `claims`: no other one may claim the place until then. FileExistsError where another one has; no process can claim
    on a file system without locks or hard links. OSError where it cannot be made.
    """

    place: Path
    path: Path

    def __init__(self, place: Path, claims: bool = False) -> None:
        self._lock, self._fd = _new_lock(place)
        self.place, self.path = place, self._lock.with_suffix(".partial")
        try:
            if claims and self._fd is not None:
                _claim(place, self._lock)
            self.path.mkdir()
        except OSError:
            self.release()
            raise

    def discard(self) -> None:
        """Removes the folder, if it is still there. What cannot be removed now may be by `sweep`."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Ends this process's work on the folder."""
        if self._fd is not None:
            _unclaim(self.place, self._fd)
            if not os.path.lexists(self.path):
                with suppress(OSError):
                    self._lock.unlink()
            os.close(self._fd)
            self._fd = None


def remove(place: Path, known_as: Path) -> None:
    """Removes the folder at `place`, which is renamed first: no process finds a half of it. OSError if it stays."""
    away = StagingFolder(known_as)
    try:
        place.rename(away.path)
        shutil.rmtree(away.path)
    finally:
        away.discard()


def sweep(folder: Path) -> list[str]:
    """Removes what processes that have ended have left in `folder`; the names of what could not be removed."""
    stuck = []
    for lock in sorted(folder.glob(".*.lock")):
        with ExitStack() as after:
            if (match := _LOCK.fullmatch(lock.name)) is None or (fd := _taken(lock)) is None:
                continue
            after.callback(os.close, fd)
            _unclaim(folder / match[1], fd)
            left = lock.with_suffix(".partial")
            try:
                if os.path.lexists(left):
                    remove(left, folder / match[1])
                lock.unlink(missing_ok=True)
            except OSError:
                stuck.append(left.name)
    return stuck


def _claim_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.claim")


def _claim(place: Path, lock: Path) -> None:
    try:
        os.link(lock, _claim_of(place))
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        return


def _unclaim(place: Path, fd: int) -> None:
    """Removes the claim that belongs to a lock. Only the process that holds the lock may."""
    with suppress(OSError):
        if os.path.samestat(os.lstat(_claim_of(place)), os.fstat(fd)):
            _claim_of(place).unlink()


def _new_lock(place: Path) -> tuple[Path, int | None]:
    """A new lock file, and the descriptor that holds it; no file and no descriptor where there are no locks."""
    while True:
        lock = place.parent / f".{place.name}.{uuid.uuid4().hex}.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            if _holds(fd, lock):
                return lock, fd
        except OSError:  # of the file system: no process can learn whether this one lives, so nothing may say it ended
            lock.unlink(missing_ok=True)
            os.close(fd)
            return lock, None
        os.close(fd)  # `sweep` of another process had it first


def _taken(lock: Path) -> int | None:
    """The descriptor that holds a lock file; None where another process has it, or may have it."""
    with ExitStack() as undo, suppress(OSError):
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        undo.callback(os.close, fd)
        if _holds(fd, lock):
            undo.pop_all()
            return fd
    return None


def _holds(fd: int, lock: Path) -> bool:
    """Locks an open lock file. True if this process has locked it and it is still there. OSError where it cannot be."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(lock))
    except (BlockingIOError, FileNotFoundError):
        return False
