"""The benchmark of plans, small. On the CPU no peak is measured; the state has the same bytes as on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan
from zeroweave.plan.hardware import Calibration

GOOD = plan.Row("tiny:16:1", 3, peak=10.0, planned_peak=10.9, step=1.0, by_sheet=0.5, calibrated=0.86, wrong=())


@pytest.mark.matrix
def test_plans_stand_beside_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.json"
    Calibration("cpu", 2, 1, {"matmul": 1e10, "memory": 1e10}, {}).save(known)
    arguments = (
        "--case tiny:16:1 --stages 1,3 --gas 2 --gpus 2 --steps 3 --warm 2 --lower none --set offload.optimizer=all"
    )
    files = ["--calibration", str(known), "--out", str(tmp_path)]
    assert plan.main([*arguments.split(), *files]) == 0, capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["problems"] == []
    rows = written["rows"]
    assert [(row["stage"], row["peak"], row["wrong"]) for row in rows] == [(1, 0.0, []), (3, 0.0, [])]
    assert all(row["calibrated"] > row["by_sheet"] > 0 and row["planned_peak"] > 0 for row in rows)
    assert "| tiny:16:1 | 3 | equal |" in (tmp_path / "plan.md").read_text()
    assert Calibration.load(tmp_path / "calibration.json").rates["matmul"] == 1e10


def test_what_must_hold() -> None:
    assert plan.problems([GOOD]) == []
    assert "| 10.00 | 10.90 | 1.090 | 1.0000 | 0.5000 | 0.500 | 0.8600 | 0.860 |" in plan.table([GOOD])
    for worse, message in (
        ({"planned_peak": 11.1}, "the peak is 1.110"),
        ({"planned_peak": 8.9}, "the peak is 0.890"),
        ({"calibrated": 1.16}, "the time is 1.160"),
        ({"calibrated": 0.84}, "the time is 0.840"),
        ({"wrong": ("masters",)}, "other bytes of masters"),
    ):
        (found,) = plan.problems([replace(GOOD, **worse)])
        assert message in found
    on_cpu = replace(GOOD, peak=0.0, calibrated=0.1)
    assert plan.problems([on_cpu]) == [] and "– | – | –" in plan.table([on_cpu])


@pytest.mark.parametrize(
    ("asked", "told"),
    [("--case tiny:16", "MODEL:SEQ"), ("--case huge:1:1", "the models are"), ("--steps 2 --warm 2", "--warm")],
)
def test_what_cannot_be_measured_is_refused(asked: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        plan.main(asked.split())
