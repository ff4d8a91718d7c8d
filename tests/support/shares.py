"""A share of a long set of tests: groups in an order that a seed decides, up to a number of minutes.

With the commit as its seed, each run takes other groups, so that all come round. Neighbouring rows of a file stay
together, because they share compilations.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable

import pytest

GROUP = 24
"""Rows at most that stay together."""


def shuffled(names: Iterable[str], seed: str) -> list[int]:
    """The places of node ids in an order that depends on them and on `seed` only.

    Each file's rows are cut into groups in their order; the groups of all files are mixed.
    """
    groups: list[list[tuple[int, str]]] = []
    for _, of_a_file in itertools.groupby(enumerate(names), key=lambda row: row[1].split("::")[0]):
        rows = list(of_a_file)
        groups += [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]
    groups.sort(key=lambda group: hashlib.sha256(f"{seed} {group[0][1]}".encode()).digest())
    return [place for group in groups for place, _ in group]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shares", "a share of a long set")
    group.addoption("--shuffle", metavar="SEED", help="run groups of rows in an order that SEED decides")
    group.addoption("--minutes", type=float, help="begin no row after so many minutes; what is left does not fail")


def pytest_configure(config: pytest.Config) -> None:
    seed, minutes = config.getoption("shuffle"), config.getoption("minutes")
    if seed is not None or minutes is not None:
        config.pluginmanager.register(Share(seed, minutes), "share")


class Share:
    """The options `--shuffle SEED` and `--minutes N`: the row that is running when they are over is the last one.

    Rows that are left neither pass nor fail; how many ran of how many is said at the end.
    """

    def __init__(self, seed: str | None, minutes: float | None) -> None:
        self.seed = seed
        self.minutes = minutes
        self.end = float("inf")
        self.rows = self.ran = 0

    @pytest.hookimpl(trylast=True)  # of what is selected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.seed is not None:
            items[:] = [items[place] for place in shuffled([item.nodeid for item in items], self.seed)]

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self.rows = len(session.items)
        if self.minutes is not None:
            self.end = time.monotonic() + 60 * self.minutes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() > self.end:
            return True  # which says that it has been dealt with
        self.ran += 1
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self.ran} of {self.rows} rows ran")
