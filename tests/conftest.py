"""Fixtures for tests that need several ranks, and the count of parity cases that a run covered."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's TCPStore looks up the name of every peer, which costs 5 s each time that a name server does not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch

from tests.support import marks, shares
from tests.support.harness import Pool
from zeroweave.runtime.shard import Shard


def pytest_addoption(parser: pytest.Parser) -> None:
    shares.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    shares.pytest_configure(config)
    config.addinivalue_line("markers", "matrix: the long set (`make matrix`); not part of `make test`")
    config.addinivalue_line("markers", "slow(*rows): rows of a test that are in the long set for the time they take")
    config.addinivalue_line("markers", "parity: one model in one setting compared with the unsharded reference")


def is_daily(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr")) == "not matrix"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares a daily run the imports of files that only the matrix has: each of its processes would make them.

    A file that the command line names is collected, so that pytest says how many of its tests are deselected.
    """
    named = (Path(each.split("::")[0]).resolve() for each in config.args)
    spared = is_daily(config) and collection_path.suffix == ".py" and collection_path not in named
    return True if spared and "\npytestmark = pytest.mark.matrix" in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Sees all rows of a test together, whichever of them are to run."""
    made = yield
    if isinstance(made, list):
        marks.move_slow_rows(item for item in made if isinstance(item, pytest.Function))
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        outcome: sum("parity" in getattr(report, "keywords", {}) for report in terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed")
    }
    if any(counts.values()):
        terminalreporter.write_line(f"parity cases: {counts['passed']} equal, {counts['failed']} not")


@pytest.fixture(autouse=True)
def only_new_objects_are_collected() -> None:
    """Spares the collections of a test (`initialize` begins with one) what imports and the tests before it hold."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def flats_apart() -> Iterator[None]:
    """With one rank, too, a flat has memory of its own: what is gathered, and when, can be seen in one process."""
    with patch.object(Shard, "can_be_flat", lambda shard, world: False):
        yield


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Callable[[int], Pool]]:
    """`pools(world)`: the pool of that size, started at its first job and kept to the end.

    What a process imports and initialises for its first compilation costs more than most tests, so daily ranks are
    forked. In the matrix up to two ranks are spawned, each with a hash seed of its own, see `Pool`.
    """
    started: dict[int, Pool] = {}
    daily = is_daily(pytestconfig)

    def pool(world: int) -> Pool:
        if world not in started:
            forked = (daily or world > 2) and not torch.cuda.is_available()  # which a forked process cannot use
            started[world] = Pool(world, tmp_path_factory.mktemp(f"ranks{world}"), forked=forked)
        return started[world]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture
def disposable(tmp_path: Path) -> Iterator[Callable[[int], Pool]]:
    """`disposable(world)`: a pool for one test, whose ranks may die."""
    made: list[Pool] = []

    def pool(world: int) -> Pool:
        made.append(Pool(world, tmp_path, deadline=300.0, forked=True))
        return made[-1]

    yield pool
    for each in made:
        each.close()
