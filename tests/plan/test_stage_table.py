"""The table of docs/stages.md is what its script finds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

pytest.importorskip("transformers")

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "stage_table.py"))
TABLE: str = SCRIPT["table"](SCRIPT["PAGE"].read_text())


@pytest.mark.matrix
def test_the_rows_of_one_size_are_those_of_the_page() -> None:
    found = [*SCRIPT["rows"]("1B")]
    assert found == [line for line in TABLE.splitlines(keepends=True) if line.startswith("| 1B ")] and len(found) == 2


@pytest.mark.matrix
def test_stages_1_and_2_take_the_same_with_one_backward_in_a_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SCRIPT["MODELS"]["1B"]))
    one, two = (SCRIPT["least"](tmp_path, stage, 8, SCRIPT["BASE"]) for stage in (1, 2))
    assert round(one[0]) == round(two[0]) and one[1] and two[1]


def test_the_page_has_both_rows_of_its_sizes() -> None:
    head, _, *rows = (line.strip("| ").split(" | ") for line in TABLE.splitlines())
    assert head == ["model", "stage", *map(str, SCRIPT["WORLDS"])]
    sizes = [row[0] for row in rows]
    assert {row[1] for row in rows} == {"1, 2", "3"} and all(sizes.count(size) == 2 for size in sizes)
    assert set(sizes) <= set(SCRIPT["MODELS"])
