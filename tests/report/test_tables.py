"""Charts, tables and sizes as text."""

from __future__ import annotations

import pytest

from zeroweave.report.tables import chart, size, table, tables


def test_a_chart_of_a_falling_curve() -> None:
    assert chart([4.0, 3.0, 2.0, 1.0], height=4) == [
        "4.00 | *",
        "     |  *",
        "     |   *",
        "1.00 |    *",
        "     +-----",
        "       step 1 4",
    ]


def test_a_long_curve_is_averaged_into_columns() -> None:
    lines = chart([float(value) for value in range(200)], width=50, height=8)
    assert lines[0].startswith("197.50 |") and lines[7].startswith("  1.50 | *")
    assert sum(line.count("*") for line in lines) == 50
    assert lines[-1].endswith("step 1" + " " * 41 + "200")


def test_charts_of_nothing_and_of_one_value() -> None:
    assert chart([]) == []
    assert chart([2.0], height=2)[0] == "2.00 | *"


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
