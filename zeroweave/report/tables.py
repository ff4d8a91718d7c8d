"""Plain text for terminals: a chart of a loss curve, tables, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def chart(values: Sequence[float], width: int = 64, height: int = 10) -> list[str]:
    """A curve as lines of text, oldest value left. Each column shows the mean of its share of the values.

    At most `width` columns after an axis; the axis names the largest and the smallest column. Values must be
    finite.
    """
    if not values:
        return []
    width = min(width, len(values))
    edges = [len(values) * column // width for column in range(width + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(columns), max(columns)
    rows = [round((high - value) / (high - low or 1.0) * (height - 1)) for value in columns]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    margin = max(map(len, labels.values()))
    lines = []
    for row in range(height):
        points = "".join("*" if at == row else " " for at in rows)
        lines.append(f"{labels.get(row, ''):>{margin}} | {points.rstrip()}")
    lines.append(f"{'':>{margin}} +-{'-' * width}")
    ends = f"step 1 {len(values):>{max(width - 7, 0)}}"
    lines.append(f"{'':>{margin}}   {ends}")
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows under a head, in columns. The first column is flush left, and the others are flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def size(count: int) -> str:
    """A number of bytes with its unit, exact below 10 KiB: "512 B", "1.66 MiB"."""
    if count < 10 * 1024:
        return f"{count} B"
    power = next(power for power in (1, 2, 3, 4) if count < 1024 ** (power + 1) or power == 4)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
