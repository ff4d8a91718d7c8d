"""Processes: which machine they are on, whether they run, for how long they have, and where they are."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from zeroweave.errors import RankFailure

_APART: Final = 3.0
"""Seconds between two looks that are too many for a process that runs."""


def machine() -> str:
    """Names this machine: two may share a host name, but not the number of the boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def network() -> str:
    """Names this process's loopback: containers of one machine may each have their own, under the same host name."""
    return f"{machine()} {_namespace('net')}"


def own() -> str:
    """Names this process, so that ranks on this machine can look at it: a number means the same in one namespace."""
    return f"{_here()} {os.getpid()}"


def host_of(process: str) -> str:
    """The host name of the machine of a process."""
    return process.partition(" ")[0]


def is_stopped(process: str) -> bool:
    """Has a signal stopped it (SIGSTOP), so that it does nothing until it is continued? False where nobody can know."""
    here, _, number = process.rpartition(" ")
    if not here or here != _here():
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # it has gone
        return False


def stacks_folder(name: str) -> Path:
    """Where the ranks of the job of this name write their stacks: one folder on each machine."""
    return Path(tempfile.gettempdir()) / f"zeroweave-stacks-{name}"


def write_stacks(place: Path, rank: int) -> str:
    """Writes the stacks of all threads of this process; the end of a message that says where, or ""."""
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        with (place / f"rank-{rank:05d}.txt").open("a") as file:
            file.write(f"rank {rank}, process {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:  # a full disk must not hide the reason
        return ""
    return f"; the ranks' stacks: {place}"


class RunningClock:
    """Counts as `time.monotonic` does, without the gaps. Whoever waits by it looks at it each second, or more often."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._gaps: list[tuple[float, float]] = []
        """when each ended, and how long it was"""

    def look(self) -> float:
        """The time now."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > _APART:
            self._gaps.append((self._looked, self._looked - before))
        return self.at(self._looked)

    def at(self, moment: float) -> float:
        """A moment of `time.monotonic` by this clock."""
        return moment - sum(gap for end, gap in self._gaps if end <= moment)


def note(error: BaseException) -> Path | None:
    """Leaves an exception to torchrun, unless there is one already. The new file, or None."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place is None or os.path.exists(place):
        return None
    with suppress(OSError):  # a full disk must not hide the reason
        get_error_handler().record_exception(error)
    return Path(place)


def end_process(reason: str) -> None:
    """Ends this process at once, whatever its other threads wait for. Exit code 1, the reason on stderr."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    # In a thread of its own: a full pipe must not hold this up.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(0.2)
    failure = RankFailure(reason)
    note(failure)
    os.write(2, f"zeroweave: {failure}\n".encode())
    os._exit(1)


def _here() -> str:
    return f"{machine()} {_namespace('pid')}"


def _namespace(kind: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""
