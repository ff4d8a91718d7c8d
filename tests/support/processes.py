"""Processes of this machine."""

from __future__ import annotations

from pathlib import Path


def is_gone(process: str) -> bool:
    """Has it ended, waited for or not? `process`: as `ranks.process.own` names it."""
    try:
        stat = Path(f"/proc/{process.rpartition(' ')[2]}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
