"""Plain text for terminals: tables, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WIDTH: Final = 80
"""Characters of a line, where its text can be broken."""


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


def tables(head: Sequence[str], rows: Sequence[Sequence[object]], keep: int = 1) -> list[str]:
    """The same as one table, or, if that is wider than `WIDTH`, as several below each other. Each has the first `keep`
    columns.
    """
    lines: list[str] = []
    stop = keep
    while stop < len(head) or not lines:
        start, stop = stop, len(head)
        while True:
            first, *others = [[str(cell) for cell in (*row[:keep], *row[start:stop])] for row in (head, *rows)]
            found = table(first, others)
            if max(map(len, found)) <= WIDTH or stop <= start + 1:
                break
            stop -= 1
        lines += ["", *found] if lines else found
    return lines


def size(count: int) -> str:
    """A number of bytes with its unit, exact below 10 KiB: "512 B", "1.66 MiB"."""
    if count < 10 * 1024:
        return f"{count} B"
    power = next(power for power in (1, 2, 3, 4) if count < 1024 ** (power + 1) or power == 4)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
