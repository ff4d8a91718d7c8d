"""Where every rank was when one was missed: Python's stacks, a file for each rank, in a folder that the error names."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path

from zeroweave.ranks.board import Board


def folder(board: Board) -> Path:
    """Where the ranks of this board write their stacks: one folder on each machine."""
    return Path(tempfile.gettempdir()) / f"zeroweave-stacks-{board.name}"


def write(place: Path, rank: int) -> str:
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
