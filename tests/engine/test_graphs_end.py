"""Graphs end before process groups do: NCCL waits for those that hold its collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import atexit
from tests.support.graphs import on_cpu
from tests.support.replays import Case, batch_of, micro_step, start

atexit.register(lambda: print(len(engine._graphs.known.windows), "left"))  # is called last
case = Case()
with on_cpu() as there:
    engine = start(case, graphs=True)
    there.serve(engine)
    for step in range(20):
        micro_step(engine, case, batch_of(case, step, 0))
assert engine.stats.replayed_steps and engine._graphs.known.windows
"""


def test_a_process_that_ends_with_an_engine_ends_its_graphs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and done.stdout == "0 left\n", done.stdout + done.stderr
