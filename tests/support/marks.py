"""Which rows are daily: the most telling one or two of each behaviour. The rest belongs to `make matrix`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(names: str | tuple[str, ...], rows: Iterable[Any], rest: Iterable[Any], **more: Any) -> pytest.MarkDecorator:
    """Parametrises a test by `rows`, which run daily, and by `rest`, which is in the matrix; `more` as for pytest."""
    return pytest.mark.parametrize(names, [*rows, *(matrix(row) for row in rest)], **more)


def matrix(row: Any) -> Any:
    """A row that only the matrix has."""
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.matrix)
