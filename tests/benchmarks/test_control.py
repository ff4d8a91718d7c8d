"""What the control plane costs, with few ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.control import NAMES
from tests.support.commands import ROOT


def figures(ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.control", "--ranks", str(ranks), "--rounds", "10"]
    found: dict[str, float] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    return found


@pytest.mark.matrix
def test_what_a_rank_sends_and_receives_does_not_grow_with_their_number() -> None:
    few, more = figures(3), figures(8)
    assert list(few) == list(more) == ["ranks", *NAMES]
    for name in ("sent_bytes", "received_bytes", "idle_bytes"):
        assert 0 < more[name] < 1.2 * few[name], (name, few, more)
    assert few["failure_seconds"] < 10 and more["failure_seconds"] < 10
