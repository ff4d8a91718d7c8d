"""Jobs of several processes, seen from outside: what runs of them, and where they listen."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.commands import ROOT

_VARIABLE = "TEST_JOB"
"""In the environment of all processes of a job."""


class Listener(NamedTuple):
    """A socket that waits for connections, and the number of its process."""

    address: str
    port: int
    process: int


class Job:
    """What is started as one job, and all that starts from it. What runs at the end of `with` is killed."""

    def __init__(self) -> None:
        self._name = str(uuid.uuid4())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def start(self, command: Sequence[object], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """One more process, whose output goes to `log`."""
        variables = {"PYTHONPATH": str(ROOT), _VARIABLE: self._name, **environment}
        with log.open("w") as output:
            return subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output
            )

    def running(self) -> dict[int, Mapping[str, str]]:
        """The environment with which each process that runs was started, by its number."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is another user's
                pairs = path.read_bytes().decode(errors="replace").split("\0")
                if f"{_VARIABLE}={self._name}" in pairs:
                    found[int(path.parent.name)] = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return found


def listeners(processes: Iterable[int]) -> set[Listener]:
    """Where these processes listen, each in its network namespace."""
    found = set()
    for process in processes:
        with suppress(OSError):
            own = _sockets(process)
            for kind in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and inode in own:
                        address, port = local.split(":")
                        found.add(Listener(_address(address), int(port, 16), process))
    return found


def _sockets(process: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(each)
            if name.startswith("socket:["):
                found.add(name[len("socket:[") : -1])
    return found


def _address(text: str) -> str:
    """The kernel's hexadecimal words, in this machine's order of bytes, as an address."""
    words: Any = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    address = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return address.removeprefix("::ffff:")
