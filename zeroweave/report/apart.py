"""Measurements on several ranks: torchrun runs a module, whose output has the result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run(module: str, ranks: int, seconds: float) -> tuple[str, str]:
    """What so many ranks of this machine print, on both streams. RuntimeError where they take more than `seconds`."""
    script = ["--standalone", "--nproc-per-node", str(ranks), "-m", module]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *script],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {seconds:g} s") from None
    return done.stdout, done.stderr


def answer_of(mark: str, output: str, errors: str) -> Any:
    """The JSON after `mark` in the output. RuntimeError with the ranks' last error where there is none."""
    for line in output.splitlines():
        if line.startswith(mark):
            return json.loads(line.removeprefix(mark))
    lines = [line.strip() for line in errors.splitlines() if "rror:" in line]
    raise RuntimeError(lines[-1] if lines else "the ranks told nothing")
