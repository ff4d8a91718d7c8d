"""`zeroweave report`: a page about a saved schedule, or about a script that is run for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report.runs import measured, schedule_of
from tests.support.commands import ROOT, zeroweave
from zeroweave import cli


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def test_a_page_about_what_a_run_has_saved(tmp_path: Path) -> None:
    saved, page = tmp_path / "rank0.json", tmp_path / "page.html"
    measured(2, 1).save(saved)
    done = invoke(saved, "-o", page)
    text = page.read_text()
    assert done.exit_code == 0, done.output
    assert f"wrote {page}, {len(text.encode()):,} bytes" in done.output.replace("\n", "")
    assert "<title>rank0.json: zeroweave report</title>" in text and "Unshard layers.1" in text


def test_a_page_about_a_schedule_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schedule_of(2, 1).save("saved.json")
    assert invoke("saved.json").exit_code == 0
    assert "predicted step" in Path("report.html").read_text()


def test_what_cannot_be_written_or_read_is_refused_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('it ran')")
    refused = invoke(script, "-o", tmp_path / "nowhere" / "report.html")
    assert refused.exit_code == 2 and "there is no folder" in refused.output
    refused = invoke(script, "--rank", 2)
    assert refused.exit_code == 2 and "no rank 2 among 2" in refused.output
    other = tmp_path / "other.json"
    other.write_text("{}")
    refused = invoke(other, "-o", tmp_path / "report.html")
    assert refused.exit_code == 2 and "version" in refused.output
    assert not (tmp_path / "report.html").exists()


@pytest.mark.matrix
def test_a_page_about_a_script_on_two_ranks(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = zeroweave(
        "report", ROOT / "examples" / "train.py", "-o", page, "--rank", 1, "--steps", 12, "--", "--stage", 2
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "ZeRO stage 2 on 2 ranks" in text and "as rank 1 saw it" in text
    assert "fastest" in text and "Settle layers.1" in text and "calls that ran compiled" in text
