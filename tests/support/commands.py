"""Runs `zeroweave ...` as a user would, in a process of its own, and other code in one that starts at once."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests.support.harness import forking

ROOT = Path(__file__).resolve().parents[2]


def zeroweave(*arguments: object, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """The finished command, with its output as text; subprocess.TimeoutExpired after `timeout` seconds."""
    command = [sys.executable, "-m", "zeroweave.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def run_code(code: str, folder: Path, *paths: Path, timeout: float = 600.0) -> tuple[int | None, str]:
    """The exit code (None: it did not end in time) and the output of a script, which can import from `paths`.

    It runs in `folder`. Its process need not import torch, which takes longer than most scripts.
    """
    said = folder / "said"
    arguments = code, [str(path) for path in paths], dict(os.environ), said
    process = forking().Process(target=_run_code, args=arguments, daemon=True)
    process.start()
    process.join(timeout)
    code_of_end = process.exitcode
    process.kill()
    return code_of_end, said.read_text()


def _run_code(code: str, paths: list[str], environment: Mapping[str, str], said: Path) -> None:
    os.environ.clear()  # it has that of the first test
    os.environ.update(environment)
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(said.parent)
    gc.freeze()  # collections would walk, and so copy, all that the process has of its parent
    sys.path[:0] = paths
    main = sys.modules["__main__"] = ModuleType("__main__")  # scripts pickle classes of their own
    exec(compile(code, "<script>", "exec"), vars(main))
    atexit._run_exitfuncs()
    sys.stdout.flush()
