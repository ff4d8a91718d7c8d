"""The table of gathers. What is measured is tests/gpu's: it takes GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.gathers import HEAD, SIZES, Cost, least, lines

MIB = 1 << 20


def costs(*totals: float) -> list[Cost]:
    return [Cost(size, total, 3 * total / 4, total / 4) for size, total in zip(SIZES, totals, strict=False)]


@pytest.mark.parametrize(
    ("kernel", "copies", "size"),
    [
        ((1, 2, 3, 4, 5), (9, 9, 2, 3, 4), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 0), MIB),
        ((1, 2, 3, 4, 5), (0, 9, 0, 0, 0), 16 * MIB),
        ((1, 2, 3, 4, 5), (0, 0, 0, 0, 5), None),
        ((1, 2), (2, 1), 4 * MIB),
    ],
)
def test_the_size_from_which_on_copy_engines_cost_less(
    kernel: Sequence[float], copies: Sequence[float], size: int | None
) -> None:
    assert least(costs(*kernel), costs(*copies)) == size


def test_each_size_is_a_row_below_the_result() -> None:
    kernel = [Cost(size * MIB, alone=1e-3, beside=8e-3, lost=2e-3) for size in (1, 4)]
    copies = [Cost(size * MIB, alone=4e-3, beside=3e-3, lost=5e-3) for size in (1, 4)]
    told, empty, head, rule, *rows = lines(kernel, copies)
    assert (told, empty) == ("by copy engine from 1 MiB on", "")
    assert head.count("|") == rule.count("|") == len(HEAD) + 1
    assert rows == [f"| {size} | 1.000 | 8.000 | 2.000 | 4.000 | 3.000 | 5.000 |" for size in (1, 4)]
