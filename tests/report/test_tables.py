"""Tables and sizes as text."""

from __future__ import annotations

import pytest

from zeroweave.report.tables import size, table, tables


def test_a_table_is_aligned() -> None:
    assert table(("", "calls"), [("all_gather", 10), ("bytes", "1 B")]) == [
        "            calls",
        "----------  -----",
        "all_gather     10",
        "bytes         1 B",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (10_239, "10239 B"),
        (10_240, "10.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 52, "4096.00 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_a_table_that_is_too_wide_becomes_several() -> None:
    head, row = ("what", "ranks", *(f"column {n}" for n in range(20))), ("stage 3", 8, *range(20))
    lines = tables(head, [row], keep=2)
    assert max(map(len, lines)) <= 80 and lines.count("") == 3
    assert sum(line.startswith("stage 3      8") for line in lines) == 4
    assert [word for word in " ".join(lines).split() if word.isdigit() and word != "8"].count("19") == 2
    assert tables(head[:5], [row[:5]], keep=2) == table(head[:5], [row[:5]])
    assert tables(head[:1], [row[:1]]) == table(head[:1], [row[:1]])
    assert len(tables(("a", "b"), [("x" * 90, "y")])) == 3
