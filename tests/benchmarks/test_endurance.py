"""The endurance runs, short: runs that pass and runs that end with an error are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.endurance import alike
from benchmarks.endurance.__main__ import main
from benchmarks.endurance.rank import Record, Spec

SMALL = "--steps 16 --rounds 1 --stages 3 --gpus 2 --stream"
SPEC = Spec("tiny", 3, True, (16, 24), 1, steps=200, watch=100, loop="train_step", lower="none")
GOOD = Record([1.0, 0.5], graphed=190, late=0, ungraphed={"new": 10}, reserved=3 * 2**20, growth=0)


@pytest.mark.matrix
def test_runs_that_pass_and_runs_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "tiny:16", "--lower", "aot_eager", "--out", str(tmp_path)]) == 0
    assert "1 runs passed, 0 failed" in capsys.readouterr().out
    assert main([*SMALL.split(), "tiny:16", "--lower", "nonsense", "--out", str(tmp_path)]) == 1
    assert "0 runs passed, 1 failed" in capsys.readouterr().out


@pytest.mark.matrix
def test_a_busy_program_trains_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--graphs both --model tiny --lengths 16,24 --steps 120 --watch 20 --stages 3 --gpus 1 --lower none"
    assert main([*asked.split(), "--loop", "busy", "--out", str(tmp_path)]) == 0
    assert "holds: tiny stage 3: losses with graphs and without are equal in 120 steps" in capsys.readouterr().out


@pytest.mark.matrix
def test_without_graphs_on_the_device_losses_are_equal_and_the_verdict_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--graphs both --model tiny --lengths 16,24 --steps 12 --watch 4 --stages 3 --gpus 2 --lower aot_eager"
    assert main([*asked.split(), "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "tiny stage 3, graphs on: 12 steps of lengths 16, 24; 0 calls as graphs" in out
    assert "tiny stage 3, graphs off: 12 steps of lengths 16, 24; 0 calls as graphs; memory not measured" in out
    assert "holds: tiny stage 3: losses with graphs and without are equal in 12 steps on 2 ranks" in out
    assert [each for each in out.splitlines() if each.startswith("FAILS")] == [
        "FAILS: tiny stage 3, graphs on: 128 calls after step 4 were no graphs: the device has none"
    ]


def test_growth_and_steps_that_are_no_graphs_are_problems() -> None:
    assert not alike.problems(SPEC, [GOOD, GOOD])
    assert alike.problems(SPEC, [GOOD, replace(GOOD, growth=1)]) == [
        "tiny stage 3, graphs on: reserved memory grows after step 100"
    ]
    assert alike.problems(SPEC, [replace(GOOD, changed=2)]) == ["tiny stage 3, graphs on: 2 kept tensors changed"]
    late = replace(GOOD, late=3)
    assert not alike.problems(replace(SPEC, loop="busy"), [late])
    assert alike.problems(SPEC, [late]) == ["tiny stage 3, graphs on: 3 calls after step 100 were no graphs: new"]
    assert not alike.problems(replace(SPEC, graphs=False), [late])
    assert "190 calls as graphs; 10 not: new; 3 MiB reserved after step 100, then 0 more" in alike.line(
        SPEC, [GOOD], 1.0
    )


def test_the_first_difference_of_any_rank_is_told() -> None:
    nan = replace(GOOD, losses=[1.0, float("nan")])
    assert alike.difference([GOOD, nan], [GOOD, nan]) is None
    other = replace(GOOD, losses=[1.5, 0.25])
    assert alike.difference([nan, GOOD], [GOOD, other]) == ("first in step 1 on rank 1, 1.0 and 1.5; in all 3 differ")


def test_growth_needs_steps_to_be_watched(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--watch must be less"):
        main(["--graphs", "on", "--steps", "100", "--out", str(tmp_path)])
