"""The benchmark from its command line, small: two implementations train the same on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lm
from benchmarks.cases import CASES


@pytest.mark.matrix
def test_implementations_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "zeroweave-z3,fsdp2-z3"
    arguments = f"--model tiny --seq 32 --impl {names} --gpus 2 --steps 4 --warm 3 --lower aot_eager"
    assert lm.main([*arguments.split(), "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "lm.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == names.split(",")
    ours, theirs = rows
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.5e-3)
    details = ours["details"]
    assert details["compiled_calls"] > 0 and not details["eager_regions"]
    assert details["traffic"]["reduce_scatter"]["calls"] == 4  # embedding, two blocks, tail
    assert "| fsdp2-z3 |" in (tmp_path / "lm.md").read_text()
    assert "peer ÷" in capsys.readouterr().out


@pytest.mark.matrix
def test_models_loops_and_settings_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "zeroweave-kept-z3,zeroweave-z2,fsdp2-ce-z3,compute"
    arguments = f"--hf --model tiny --seq 32 --gas 2 --loop plain --impl {names} --gpus 2 --steps 7 --warm 3"
    more = "--variant kept compile.keep=all --lower none --host-profile compute --in-a-row 2"
    assert lm.main([*arguments.split(), *more.split(), "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = {row["impl"]: row for row in json.loads((tmp_path / "lm.json").read_text())["rows"]}
    assert list(rows) == names.split(",")
    assert "7 steps of which 3 are warm-up, 2 in a row" in (tmp_path / "lm.md").read_text()
    for name in names.split(","):
        assert len(rows[name]["losses"]) == 7
        assert rows[name]["losses"] == pytest.approx(rows["fsdp2-ce-z3"]["losses"], abs=0.5e-3)
    assert rows["zeroweave-kept-z3"]["details"]["config"]["compile"]["keep"] == "all"
    assert "gathers are plain" in rows["fsdp2-ce-z3"]["note"]
    assert "run_backward" in (tmp_path / "host-compute.txt").read_text()
    assert [path.name for path in tmp_path.glob("host-*")] == ["host-compute.txt"]


@pytest.mark.matrix
def test_a_failing_rank_is_shown_and_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 32 --impl zeroweave-z3 --gpus 1 --steps 2 --warm 1"
    assert lm.main([*arguments.split(), "--set", "stage=9", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "zeroweave-z3: rank 0 exited with 1" in out and "stage" in out


@pytest.mark.matrix
def test_another_one_runs_where_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 32 --lora 4 --impl compute|fsdp2-z3,zeroweave-z3 --gpus 2 --steps 3 --warm 1"
    assert lm.main([*arguments.split(), "--lower", "none", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "compute has no --lora" in out and "compute failed; fsdp2-z3 instead" in out and "failed: compute\n" in out
    theirs, ours = json.loads((tmp_path / "lm.json").read_text())["rows"]
    assert [theirs["impl"], ours["impl"]] == ["fsdp2-z3", "zeroweave-z3"]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.5e-3)


@pytest.mark.matrix
def test_sharding_groups_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "zeroweave-z3,fsdp2-z3"
    arguments = f"--model tiny --seq 32 --group-size 2 --impl {names} --gpus 4 --steps 3 --warm 1 --lower none"
    assert lm.main([*arguments.split(), "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "lm.json").read_text())
    ours, theirs = result["rows"]
    assert "sharding groups of 2" in result["title"]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.5e-3)


def test_sharding_groups_have_equal_sizes() -> None:
    with pytest.raises(SystemExit, match="--group-size 3 does not divide 4 ranks"):
        lm.main(["--group-size", "3", "--gpus", "4"])


@pytest.mark.matrix
def test_the_graphed_peer_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 32 --impl fsdp2-ce-graphs-z3 --gpus 2 --steps 3 --warm 1 --lower none"
    assert lm.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    assert "copy engines need GPUs and two ranks; no CUDA graph: it needs a GPU" in capsys.readouterr().out


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny --seq 32 --impl zeroweave-z3 --gpus 1 --steps 2 --warm 1 --timeout 0.5"
    assert lm.main([*arguments.split(), "--out", str(tmp_path)]) == 1
    assert "zeroweave-z3: not done after 0.5 s" in capsys.readouterr().out


def test_every_case_can_be_asked_for() -> None:
    for name, case in CASES.items():
        a = lm.parser().parse_args(case.arguments.split())
        found = lm.implementations(a.impl, ce_rs=False, variants={name: {} for name, *_ in a.variant})
        names = [each for (each,) in found]
        assert {*case.speed, *case.host, *case.no_slower, *case.no_slower.values()} <= set(names), name


def test_symmetric_reductions_come_beside_copy_engine_gathers() -> None:
    found = lm.implementations("zeroweave-z3, fsdp2-ce-z3,fsdp2-z3", ce_rs=True, variants={})
    assert found == [["zeroweave-z3"], ["fsdp2-ce-z3"], ["fsdp2-ce-rs-z3"], ["fsdp2-z3"]]


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown fsdp3"):
        lm.main(["--impl", "fsdp3"])
