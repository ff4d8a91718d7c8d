"""The benchmark of saves, small, on two CPU ranks, and what it makes of figures made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.saving import Figures, Found, main


def test_the_first_round_is_left_out_and_the_limits_are_ratios() -> None:
    found = Found("CPU", 2**30, [9.0, 1.0], [9.0, 1.25], [9.0, 0.125], [[1.0], [0.5, 1.5]], [[9.0], [1.0, 1.08]])
    figures = Figures.of(found)
    assert figures == Figures(1.0, 1.25, 0.125, 1.0, 1.04, (9.0, 1.04)) and figures.held
    assert "| `save` | 1.250 | 0.80 | 0.80 of save_file's speed |" in figures.table(1.0)
    assert not Figures(1.0, 1.25, 0.126, 1.0, 1.04, ()).held
    assert not Figures(1.0, 1.7, 0.1, 1.0, 1.04, ()).held
    assert not Figures(1.0, 1.25, 0.1, 1.0, 1.06, ()).held


@pytest.mark.matrix
@pytest.mark.parametrize("offload", ["none", "all"])
def test_all_kinds_are_measured(tmp_path: Path, offload: str) -> None:
    small = "--model tiny --seq 8 --lower none --warm 2 --steps 1 --rounds 1 --gpus 2"
    assert main([*small.split(), "--offload", offload, "--folder", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert "| a step beside an asynchronous save |" in (tmp_path / "saving.md").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["saving.md"]
