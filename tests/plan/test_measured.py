"""Plans come as near to what two H200 did as plans are to come: `h200.json` has what was measured there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import PEAK, STEP, parser, planned, spec_of
from zeroweave.plan.hardware import GPUS, Calibration, Hardware

pytestmark = pytest.mark.matrix

MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text())
ROWS: list[dict[str, Any]] = MEASURED["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}-z{row['stage']}")
def test_peaks_and_times_are_near_what_was_measured(row: dict[str, Any]) -> None:
    known, sheet = Calibration(**MEASURED["calibration"]), GPUS["h200"]
    spec = spec_of(row["case"], parser().parse_args([]))
    plan = planned(spec, row["stage"], 2, Hardware(sheet, known.efficiency(sheet))).plan()
    assert plan.peak / 2**30 == pytest.approx(row["peak_gib"], rel=PEAK)
    assert plan.seconds == pytest.approx(row["step_s"], rel=STEP)
