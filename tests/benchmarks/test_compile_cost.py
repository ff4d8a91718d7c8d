"""Verdicts on compile cost from records made by hand, and one small run whose counts (never times) must hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import compile_cost
from benchmarks.compile_cost import Record, Spec

PHASES = {"dynamo": 1.0, "lower": 8.0}
COLD = Record(0, 10.0, 9.0, 0.1, 4, 0, 4, PHASES)
WARM = replace(COLD, first_step=2.0, found=4, compiled=0)


def results(**many: float) -> list[tuple[Spec, list[Record]]]:
    """Of 2 and 4 blocks, alone and on two ranks; `many` replaces what was found with 4 blocks."""
    most = replace(COLD, **many)
    return [
        (Spec("zeroweave", 2, 1, "a"), [COLD]),
        (Spec("zeroweave", 4, 1, "b"), [most]),
        (Spec("zeroweave", 4, 1, "b", warm=True), [WARM]),
        (Spec("whole", 4, 1, "c"), [replace(COLD, lowered=2, compiled=2, phases={})]),
        (
            Spec("zeroweave", 2, 2, "d"),
            [replace(COLD, found=1, compiled=3), replace(COLD, rank=1, found=3, compiled=1)],
        ),
        (Spec("zeroweave", 2, 2, "d", warm=True), [WARM, replace(WARM, rank=1)]),
    ]


def failing(found: list[tuple[Spec, list[Record]]]) -> list[int]:
    return [index for index, (holds, _) in enumerate(compile_cost.verdicts(found)) if not holds]


def test_verdicts_name_what_fails() -> None:
    assert failing(results()) == []
    assert failing(results(compiled=5)) == [0]
    assert failing(results(first_step=13.1)) == [1]
    alone = results()
    alone[4] = (alone[4][0], [COLD, COLD])
    assert failing(alone) == [2]
    alone = results()
    alone[2] = (alone[2][0], [replace(WARM, compiled=1)])
    assert failing(alone) == [3]
    assert "first step at 4 blocks 1.000 × that at 2" in compile_cost.verdicts(results())[1][1]


def test_every_rank_has_a_line_with_all_phases() -> None:
    lines = compile_cost.table(results()).splitlines()
    assert len(lines) == 2 + 8 and len({line.count("|") for line in lines}) == 1
    assert lines[0].endswith("| dynamo s | lower s |") and "torch.compile(model)" in lines[5]


@pytest.mark.matrix
def test_counts_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_cost.main(["--layers", "2,3", "--batch", "1", "--length", "16", "--out", str(tmp_path)])
    text = (tmp_path / "compile_cost.md").read_text()
    assert "holds: compilations at 2 / 3 blocks: 4 / 4" in text, text
    assert "holds: 2 ranks compile 4 graphs together" in text and "holds: warm starts compile 0 graphs" in text
    assert all(f"{phase} s |" in text for phase in ("dynamo", "aot", "partition", "wait", "lower"))
    assert text.strip() in capsys.readouterr().out
