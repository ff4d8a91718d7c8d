"""What was measured becomes shares of a data sheet, of the right one only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeroweave.errors import EngineError
from zeroweave.plan.hardware import GPUS, Calibration, Efficiency

H200 = Calibration("NVIDIA H200", 2, 1, {"matmul": 7.5e14, "host": 5.6e10}, {"kernel": 4e-6, "contention": 0.3})


def test_what_was_measured_counts_and_the_rest_stays() -> None:
    assert H200.gpu == "h200" and replace(H200, device="cpu").gpu is None
    share = H200.efficiency(GPUS["h200"])
    wanted = replace(Efficiency(), matmul=7.5e14 / 989.5e12, host=5.6e10 / 64e9, kernel=4e-6, contention=0.3)
    assert share == wanted
    told = H200.lines()
    assert told[0].startswith("measured on 2 x NVIDIA H200, 1 host: matmul 7.5e+14/s")
    assert told[1].startswith("by default: ") and "between" in told[1] and "kernel" not in told[1]


def test_another_gpus_figures_are_refused() -> None:
    with pytest.raises(EngineError, match=r"matmul, on NVIDIA H200.*--gpu"):
        H200.efficiency(GPUS["a100"])


def test_a_file_is_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    H200.save(path)
    assert Calibration.load(path) == H200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "Invalid JSON"),
        ("{}", "device"),
        (json.dumps({**vars(H200), "rates": {"speed": 1.0}}), "rates.speed"),
        (json.dumps({**vars(H200), "rates": {"kernel": 1.0}}), "rates.kernel"),
        (json.dumps({**vars(H200), "rates": {"matmul": 0.0}}), "rates.matmul"),
        (json.dumps({**vars(H200), "seconds": {"kernel": -1.0}}), "seconds.kernel"),
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(EngineError, match=f"a.json is no calibration.*{told}"):
        Calibration.load(path)
    with pytest.raises(EngineError, match="No such file"):
        Calibration.load(tmp_path / "b.json")
