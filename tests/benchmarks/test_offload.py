"""The benchmark of offload, small. On the CPU no peak is measured; where the state lies is the same as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import offload


@pytest.mark.matrix
def test_every_setting_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 16 --micro-batch 1 --gpus 2 --steps 1 --rounds 1 --warm 6 --lower aot_eager"
    assert offload.main([*arguments.split(), "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = [line.split(" | ") for line in (tmp_path / "offload.md").read_text().splitlines() if " | " in line][1:]
    names = [row[0].strip("| ") for row in rows]
    assert names == list(offload.SETTINGS)
    assert len({row[-1] for row in rows}) == 1, "equal losses"


def row(name: str, peak: int, device: int, **more: float) -> dict[str, float | str]:
    state = {"masters": 400, "moments": 800, "host_masters": 0, "host_moments": 0, "loss": 1.0, "budget": 0}
    return {"name": name, "peak": peak, "device": device, **state, **more}


def test_what_must_hold() -> None:
    good = [row("none", 5000, 1200), row("all", 4000, 200), row("adaptive", 4500, 700, budget=4500)]
    good.append(row("all + params", 3900, 0))
    assert offload.problems(good) == []
    assert offload.budget(*good[:2]) == 4500
    for index, worse, message in (
        (1, {"peak": 4300}, "all: the peak falls by less than 0.9 × moments"),
        (3, {"peak": 4000}, "all + params: the peak falls by less than 0.9 × masters and moments"),
        (2, {"peak": 4501}, "above the budget"),
        (2, {"device": 1200}, "not between"),
        (2, {"loss": 1.1}, "losses differ"),
    ):
        rows = [{**each, **(worse if i == index else {})} for i, each in enumerate(good)]
        (found,) = offload.problems(rows)
        assert message in found
