"""The comparison of gradient targets, small. On the CPU no memory is measured, so the difference does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import lifetime

pytestmark = pytest.mark.matrix


def test_both_ways_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 16 --micro-batch 1 --gpus 2 --steps 3 --warm 2 --lower aot_eager"
    assert lifetime.main([*arguments.split(), "--out", str(tmp_path)]) == 1, capsys.readouterr().out
    local, kept = (tmp_path / "lifetime.md").read_text().splitlines()[4:6]
    assert local.startswith("| step-local |") and kept.startswith("| kept |")
    assert local.split("|")[4] == kept.split("|")[4], "equal losses"
    assert "flat gradient partition 0.000 GiB" in capsys.readouterr().out
