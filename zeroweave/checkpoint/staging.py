"""Folders that are not whole: each is next to its place, and a lock tells whether its process still lives.

    DIR/.step-00000300.partial        what is being written, or removed
    DIR/.step-00000300.partial.lock   empty, and locked (`flock`) from before the folder is there until it has gone

The system releases the locks of a process that has ended, however it has ended. So a process that gets such a lock
knows that no other one works on the folder any more. Only the holder of the lock removes the file. A process that has
locked a file checks that the name still means this file.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOCK: Final = re.compile(r"\..+\.partial\.lock")


class StagingFolder:
    """A new folder next to `place`, at `path`. It is this process's until `release` or `discard`, one of which is due.

    FileExistsError where another process has one for this place, OSError where it cannot be made.
    """

    place: Path
    path: Path

    def __init__(self, place: Path) -> None:
        self.place, self.path = place, place.with_name(f".{place.name}.partial")
        self._lock = place.with_name(f"{self.path.name}.lock")
        self._fd = _new_lock(self._lock)
        try:
            if self._fd is not None:  # what a process that has ended left there
                shutil.rmtree(self.path, ignore_errors=True)
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
            if not os.path.lexists(self.path):
                with suppress(OSError):
                    self._lock.unlink()
            os.close(self._fd)
            self._fd = None


def remove(place: Path) -> None:
    """Removes the folder at `place`, which is renamed first: no process finds a half of it. OSError if it stays."""
    away = StagingFolder(place)
    try:
        place.rename(away.path)
        shutil.rmtree(away.path)
    finally:
        away.discard()


def sweep(folder: Path) -> list[str]:
    """Removes what processes that have ended have left in `folder`; the names of what could not be removed."""
    stuck = []
    for lock in sorted(folder.glob(".*.partial.lock")):
        if _LOCK.fullmatch(lock.name) is None or (fd := _taken(lock)) is None:
            continue
        left = lock.with_suffix("")
        try:
            if os.path.lexists(left):
                shutil.rmtree(left)
            lock.unlink(missing_ok=True)
        except OSError:
            stuck.append(left.name)
        finally:
            os.close(fd)
    return stuck


def _new_lock(lock: Path) -> int | None:
    """The descriptor that holds a lock file; no file and None where there are no locks.

    FileExistsError where another process holds it.
    """
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            if _holds(fd, lock):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise FileExistsError(f"another process holds {lock}") from None
        except OSError:  # of the file system: no process can learn whether this one lives, so nothing may say it ended
            lock.unlink(missing_ok=True)
            os.close(fd)
            return None
        os.close(fd)  # another process had it first, and has removed it


def _taken(lock: Path) -> int | None:
    """The descriptor that holds a lock file; None where another process has it, or may have it."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with suppress(OSError):
        if _holds(fd, lock):
            return fd
    os.close(fd)
    return None


def _holds(fd: int, lock: Path) -> bool:
    """Locks an open lock file. True if it is still there.

    BlockingIOError where another process has locked it, another OSError where nothing can be locked.
    """
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(lock))
    except FileNotFoundError:
        return False
