"""The benchmark of exposed communication, small: each schedule is measured with and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exposed

pytestmark = pytest.mark.matrix


def test_each_schedule_has_a_row(tmp_path: Path) -> None:
    small = "--model tiny --seq 16 --micro-batch 1 --steps 1 --rounds 1 --warm 1 --lower aot_eager --gpus 2"
    exposed.main([*small.split(), "--out", str(tmp_path)])
    text = (tmp_path / "exposed.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["as needed", "one call ahead", "from measured times"]
    assert all(float(row[1]) > 0 and float(row[2]) > 0 and int(row[6]) > 0 for row in rows)
