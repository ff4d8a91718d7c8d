"""The endurance runs, short: runs that pass and runs that end with an error are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import endurance

SMALL = "--steps 16 --rounds 1 --stages 3 --gpus 2 --stream"


@pytest.mark.matrix
def test_runs_that_pass_and_runs_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert endurance.main([*SMALL.split(), "tiny:16", "--lower", "aot_eager", "--out", str(tmp_path)]) == 0
    assert "1 runs passed, 0 failed" in capsys.readouterr().out
    assert endurance.main([*SMALL.split(), "tiny:16", "--lower", "nonsense", "--out", str(tmp_path)]) == 1
    assert "0 runs passed, 1 failed" in capsys.readouterr().out
