"""What a rank can see of another one's process, if both run on one machine."""

from __future__ import annotations

import os
from contextlib import suppress

from zeroweave.ranks.board import machine


def own() -> str:
    """Names this process, so that ranks on this machine can look at it: a number means the same in one namespace."""
    return f"{_here()} {os.getpid()}"


def is_gone(process: str) -> bool:
    """Has it certainly ended?"""
    return _state(process) in ("", "Z", "X")


def is_stopped(process: str) -> bool:
    """Has a signal stopped it (SIGSTOP), so that it does nothing until it is continued?"""
    return _state(process) == "T"


def _here() -> str:
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{machine()} {namespace}"


def _state(process: str) -> str | None:
    """The kernel's letter for it; "" once it is gone; None where this process cannot know."""
    here, _, number = process.rpartition(" ")
    if not here or here != _here():
        return None
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except (OSError, IndexError):
        return None
