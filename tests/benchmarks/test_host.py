"""The benchmark of host time, small, on two CPU ranks, and what it makes of figures made by hand."""

from __future__ import annotations

import pytest

from benchmarks import host, launch
from benchmarks.host_rank import Record

SMALL = "--blocks 2 --width 4 --warm 4 --steps 1 --turns 1"


def test_the_slowest_rank_counts_and_the_last_line_is_the_measure() -> None:
    ours = host.worst([Record(10.0, 40.0, 12.0, 80.0), Record(20.0, 30.0, 24.0, 60.0)])
    assert ours == Record(20.0, 40.0, 24.0, 80.0)
    lines = host.table([("zeroweave", ours), ("older", Record(40.0, 80.0, 50.0, 90.0))]).splitlines()
    assert lines[2:] == [
        "| zeroweave | 20.0 | 40.0 | 0.500 | 24.0 | 80.0 |",
        "| older | 40.0 | 80.0 | 1.000 | 50.0 | 90.0 |",
    ]


@pytest.mark.matrix
def test_kinds_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main([*SMALL.split(), "--package", str(launch.ROOT)]) == 0
    *_, plain, ours, other = capsys.readouterr().out.strip().splitlines()
    assert plain.startswith("| torch.compile |") and ours.startswith("| zeroweave |")
    assert other.startswith(f"| {launch.ROOT} |") and "| 1.000 |" in other
