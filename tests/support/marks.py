"""Which rows are daily: the most telling one or two of each behaviour. The rest belongs to `make matrix`.

`daily` chooses by what a row shows, `slow` by what it takes: `make test` has five minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MODES: dict[str, dict[str, Any]] = {"eager": {"enabled": False}, "aot_eager": {"lower": "aot_eager"}}
"""How modules run, as the config's `compile`, by what rows call it."""
WITH_INDUCTOR: dict[str, dict[str, Any]] = {**MODES, "inductor": {}}


def daily(names: str | tuple[str, ...], rows: Iterable[Any], rest: Iterable[Any], **more: Any) -> pytest.MarkDecorator:
    """Parametrises a test by `rows`, which run daily, and by `rest`, which is in the matrix; `more` as for pytest."""
    return pytest.mark.parametrize(names, [*rows, *(matrix(row) for row in rest)], **more)


def matrix(row: Any) -> Any:
    """A row that only the matrix has."""
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.matrix)


def slow(*rows: str) -> pytest.MarkDecorator:
    """Rows, by what stands in brackets, that show enough to be daily and take too long: the matrix has them."""
    return pytest.mark.slow(*rows)


def move_slow_rows(items: Iterable[pytest.Function]) -> None:
    """Marks what `slow` names among all rows of one test.

    Raises `pytest.Collector.CollectError` for a row that the test does not have.
    """
    rows = {item.callspec.id: item for item in items if hasattr(item, "callspec")}
    for row, item in rows.items():
        for name in (name for mark in item.iter_markers("slow") for name in mark.args):
            if name not in rows:
                raise pytest.Collector.CollectError(f"{item.originalname} has no row {name!r} that could be slow")
            if name == row:
                item.add_marker(pytest.mark.matrix)


# Rows that several files have.
STAGES = daily("stage", [3], [1, 2])
FEW = daily(("stage", "mode"), [(3, "aot_eager")], [(1, "eager")])
SETTINGS = daily(("stage", "mode"), [(3, "aot_eager")], [(1, "eager"), (2, "aot_eager"), (3, "eager")])
