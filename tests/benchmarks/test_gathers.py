"""The table of gathers. What is measured is tests/gpu's: it takes GPUs."""

from __future__ import annotations

from benchmarks.gathers import HEAD, lines
from zeroweave.comm.choose import Choice, Cost

MIB = 1 << 20


def test_each_size_is_a_row_and_what_was_chosen_stands_above() -> None:
    kernel = tuple(Cost(size * MIB, lost=2e-3, takes=3e-3, alone=1e-3) for size in (1, 4))
    copies = tuple(Cost(size * MIB, lost=5e-3, takes=6e-3, alone=4e-3) for size in (1, 4))
    told, empty, head, rule, *rows = lines(Choice("measured at the start", 4 * MIB, kernel, copies))
    assert (told, empty) == ("by copy engine from 4 MiB on: measured at the start", "")
    assert head.count("|") == rule.count("|") == len(HEAD) + 1
    assert rows == [f"| {size} | 1.000 | 3.000 | 2.000 | 4.000 | 6.000 | 5.000 |" for size in (1, 4)]
