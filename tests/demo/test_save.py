"""`zeroweave demo --save`: a demo that was killed goes on, and its losses are those of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

pytestmark = pytest.mark.matrix


def demo(folder: Path, fault: str = "") -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, "-m", "zeroweave.cli", "demo", "--eager", "--steps", "24", "--save", str(folder)]
    environment = os.environ | {"ZEROWEAVE_FAULT": fault}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {}


def test_killed_and_resumed(tmp_path: Path) -> None:
    _, _, whole = demo(tmp_path / "whole")
    code, _, _ = demo(tmp_path / "killed", "kill:rank=1,step=22,phase=backward")
    assert code == 137
    code, output, resumed = demo(tmp_path / "killed")
    assert code == 0 and f"going on behind step 20, from {tmp_path / 'killed'}" in output
    assert resumed["ok"] and resumed["steps"] == 24
    assert [resumed[key] for key in ("loss_first", "loss_last")] == [whole[key] for key in ("loss_first", "loss_last")]
