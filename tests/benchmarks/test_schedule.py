"""The benchmark of schedules, small: nothing is compiled anew, and each prediction has a measured step beside it."""

from __future__ import annotations

import pytest

from benchmarks import schedule

pytestmark = pytest.mark.matrix


def test_schedules_change_without_compiling(capsys: pytest.CaptureFixture[str]) -> None:
    schedule.main(["--blocks", "4", "--steps", "1", "--compute", "0.001", "--delay", "0.001"])
    out = capsys.readouterr().out
    assert "4 blocks, " in out and "2 ranks: 0 recompiles" in out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith(("| 0 |", "| 1 |", "| 2 |"))]
    assert [len(row) for row in rows] == [6, 6, 6]
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows)
