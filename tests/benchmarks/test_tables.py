"""The rows of benchmarks/tables.sh: known comparisons, of implementations of the stage that they compare."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import lm
from benchmarks.cases import CASES

SCRIPT = Path(lm.__file__).with_name("tables.sh").read_text()
ROWS = re.findall(r"^    row (\S+) (\S+) (z\d) (.+)$", SCRIPT, re.MULTILINE)


def test_rows_are_known_comparisons() -> None:
    assert len(ROWS) > 9
    for name, case, stage, arms in ROWS:
        asked = lm.parser().parse_args(CASES[case].arguments.split())
        known = {each for (each,) in lm.implementations(asked.impl, ce_rs=False, variants={})}
        names = {f"{'fsdp2-ce-graphs' if arm == 'peer' else arm}-{stage}" for arm in arms.split()}
        unlike = {each.replace("-fours", "") for each in names} - known  # any row may have four blocks in a bucket
        assert not unlike, (name, unlike)


def test_the_header_names_every_row() -> None:
    header = re.sub(r"\n# *", " ", SCRIPT.split("\nset -uo")[0])
    for name, *_ in ROWS:
        assert re.search(rf"[ ,]{re.escape(name)}[ ,;]", header), name
