"""A share of a long set of tests: its order, its end, and what is said of it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.shares import GROUP, shuffled

NAMES = [f"{file}::test_{index}" for file in "abcdefgh" for index in range(3 * GROUP // 2)]


def test_a_seed_decides_the_order_of_groups() -> None:
    orders = [shuffled(NAMES, seed) for seed in ("one", "one", "another")]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == list(range(len(NAMES)))
        together = sum(second == first + 1 for first, second in itertools.pairwise(order))
        assert together >= len(NAMES) - 16, "rows of a group follow each other"


def test_every_row_is_the_first_of_some_seed_s() -> None:
    firsts = {NAMES[shuffled(NAMES, str(seed))[0]] for seed in range(300)}
    assert firsts == {f"{file}::test_{start}" for file in "abcdefgh" for start in (0, GROUP)}


ROWS = """
import time
import pytest

@pytest.mark.parametrize("row", range(6))
def test_slow(row):
    time.sleep(0.5)
    assert row not in FAILING
"""


def run(folder: Path, failing: list[int], *arguments: str) -> tuple[int, str]:
    (folder / "test_rows.py").write_text(ROWS.replace("FAILING", str(failing)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "tests.support.shares", *arguments, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


@pytest.mark.matrix
def test_what_is_left_when_the_time_is_over_neither_passes_nor_fails(tmp_path: Path) -> None:
    code, told = run(tmp_path, [], "--minutes", "0.001")
    assert code == 0, told
    assert "1 of 6 rows ran" in told and "1 passed" in told.splitlines()[-1], told
    code, told = run(tmp_path, list(range(6)), "--minutes", "0.001")
    assert code == 1 and "1 failed" in told.splitlines()[-1], told
    code, told = run(tmp_path, [], "--minutes", "10", "--shuffle", "commit")
    assert code == 0 and "6 of 6 rows ran" in told, told
