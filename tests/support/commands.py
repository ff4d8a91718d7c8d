"""Runs `zeroweave ...` as a user would, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def zeroweave(*arguments: object, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """The finished command, with its output as text; subprocess.TimeoutExpired after `timeout` seconds."""
    command = [sys.executable, "-m", "zeroweave.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
