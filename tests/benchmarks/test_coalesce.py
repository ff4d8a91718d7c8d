"""The benchmark of windows, small, on two CPU ranks; what it says where DeepSpeed is missing, fails or is slower."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import coalesce
from benchmarks.windows import Row

SMALL = "--width 16 --layers 2 --rows 4 --backwards 2 --warm 1 --rounds 1 --lower none --timeout 100"


@pytest.mark.matrix
def test_all_modes_of_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL.split(), "--stages", "2", "--engines", "zeroweave,plain", "--out", str(tmp_path)]
    assert coalesce.main([*arguments, "--set", "compile.prefetch=1"]) == 0, capsys.readouterr().out
    *found, plain = json.loads((tmp_path / "coalesce.json").read_text())["rows"]
    assert plain["engine"] == "plain" and plain["backwards_ms"] > 0 and not plain["collectives"] and plain["wire"] == 0
    rows = {row["mode"]: row for row in found}
    assert plain["loss"] == pytest.approx(rows["coalesce"]["loss"], rel=0.05)
    assert list(rows) == ["baseline", "no_sync", "coalesce"]
    for mode, row in rows.items():
        assert row["step_ms"] > 0 and row["backwards_ms"] > 0 and row["peak"] is None
        assert row["collectives"] == {"all_gather": 1, "reduce_scatter": 2 if mode == "baseline" else 1}
    flat = 2 * 16 * 16 * 2 / 2**20  # MiB in bf16, of which each of two ranks sends a half
    assert rows["coalesce"]["wire"] == pytest.approx(flat)
    assert rows["baseline"]["wire"] == pytest.approx(1.5 * flat)
    text = (tmp_path / "coalesce.md").read_text()
    assert "| zeroweave | 2 | coalesce | 2 |" in text and "zeroweave eager, compile.prefetch=1," in text


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DeepSpeed that is installed and cannot be imported."""
    (tmp_path / "deepspeed.py").write_text("raise OSError('CUDA_HOME does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("broken")
@pytest.mark.matrix
def test_a_peer_that_fails_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *SMALL.split(),
        "--stages",
        "3",
        "--engines",
        "deepspeed",
        "--peer-timeout",
        "240",
        "--out",
        str(tmp_path),
    ]
    assert coalesce.main(arguments) == 0
    told = json.loads((tmp_path / "coalesce.json").read_text())
    (note,) = told["notes"]
    assert note.startswith("deepspeed stage 3: rank ") and note.endswith("OSError: CUDA_HOME does not exist")
    assert [row["missing"] for row in told["rows"]] == [note.partition(": ")[2]] * 3
    assert note in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    specs, notes = coalesce.plan(coalesce.parser().parse_args(["--stages", "2,3"]))
    assert [(spec.engine, spec.stage) for spec in specs] == [("zeroweave", 2), ("zeroweave", 3), ("plain", 0)]
    assert notes == ["DeepSpeed is not installed"]


def test_a_stage_that_takes_too_long_fails(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL.split(), "--stages", "1", "--engines", "zeroweave", "--timeout", "0.3"]
    assert coalesce.main(arguments) == 1
    assert "| zeroweave | 1 | baseline | 2 | – (not done after 0.3 s" in capsys.readouterr().out


OURS = Row("zeroweave", 2, "coalesce", 4, 5.0, 9.0, 400.0, 256.0, 128.0, {"reduce_scatter": 1}, 128.0)
PEERS = replace(OURS, engine="deepspeed", backwards_ms=12.5, peak=1300.0, collectives={"all_reduce": 1}, wire=256.0)


def test_a_rank_s_worst_figures_count() -> None:
    slower, larger = replace(OURS, backwards_ms=6.0), replace(OURS, peak=500.0)
    assert coalesce.worst([slower, larger]) == replace(OURS, backwards_ms=6.0, peak=500.0)
    assert coalesce.worst([OURS, replace(OURS, peak=None)]).peak is None


def test_the_table_compares_with_the_peer() -> None:
    rows = [OURS, PEERS, replace(PEERS, mode="no_sync", missing="refused")]
    lines = coalesce.table(rows).splitlines()
    assert all(line.count("|") == len(coalesce.COLUMNS) + 1 for line in lines)
    assert "| – (refused) |" in lines[2]
    assert "| 400.0 | 256.0 | 128.0 | 5.00 | 0.40 | 9.00 | 1 reduce_scatter | 128.0 |" in lines[3]


def test_verdicts_name_what_fails() -> None:
    third = replace(OURS, stage=3)
    assert all(holds for holds, _ in coalesce.verdicts([OURS, PEERS, third], known_size=True))
    slow = replace(third, backwards_ms=9.0, resident=300.0)
    found = coalesce.verdicts([replace(OURS, peak=1301.5), PEERS, slow], known_size=True)
    assert [text for holds, text in found if not holds] == [
        "stage 3, 4 coalesced backwards: 9.00 ms, at most 0.15 × 59.4 ms",
        "stage 2, 4 coalesced backwards: peak window 1301.5 MiB, DeepSpeed's 1300.0",
        "stage 3, 4 coalesced backwards: window resident 300.0 MiB, DeepSpeed's 256.0",
    ]
    assert [text for holds, text in coalesce.verdicts([OURS], known_size=True) if not holds] == [
        "stage 3, 4 coalesced backwards: not measured"
    ]
    assert coalesce.verdicts([slow], known_size=False) == []


@pytest.mark.parametrize(("stage", "peak"), [(1, 1210.0), (2, 1210.0), (3, 656.0)])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_memory_has_limits_where_the_peer_is_not_beside(stage: int, peak: float, n: int) -> None:
    def verdicts(**more: float) -> list[tuple[bool, str]]:
        row = replace(OURS, stage=stage, n=n, **more)
        return [each for each in coalesce.verdicts([row], known_size=True) if " ms" not in each[1] and "MiB" in each[1]]

    within, beyond = verdicts(peak=peak + 1.0, resident=257.0), verdicts(peak=peak + 2.0, resident=258.0)
    assert [holds for holds, _ in within] == [True, True] and [holds for holds, _ in beyond] == [False, False]
    assert [text for _, text in beyond] == [
        f"stage {stage}, {n} coalesced backwards: window resident 258.0 MiB, DeepSpeed's 256.0",
        f"stage {stage}, {n} coalesced backwards: peak window {peak + 2.0} MiB, DeepSpeed's {peak}",
    ]
    assert verdicts(peak=2.0, resident=2.0, pool=peak - 100.0, registered=100.0) == beyond[1:]


def test_what_graphs_and_their_gathers_have_counts_with_the_peak() -> None:
    graphs = replace(OURS, peak=0.0, resident=0.0, pool=500.0, registered=160.0)
    assert "| 0.0 + 500.0 of graphs + 160.0 of registered buffers |" in coalesce.table([graphs])
    assert coalesce.worst([graphs, replace(graphs, registered=170.0)]).registered == 170.0


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(SystemExit, match="--modes: unknown coalesced"):
        coalesce.main(["--modes", "coalesced"])
