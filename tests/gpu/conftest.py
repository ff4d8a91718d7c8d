"""These tests run two ranks over NCCL, each on a GPU of its own where there are two.

Both ranks share the GPU of a machine that has only one, which NCCL does between ranks that seem to be on machines of
their own (see `jobs.join`). What is about GPUs that reach each other's memory is marked `gpus(2)` and skipped there.
Without a GPU all are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.harness import Pool

WORLD = 2
HERE = Path(__file__).parent
COMPILING = 240.0
"""Seconds for a job, of which most may go into Inductor's first compilation."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs so many GPUs, not only as many ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        if HERE in item.path.parents:
            marker = item.get_closest_marker("gpus")
            needed = marker.args[0] if marker else 1
            item.add_marker(pytest.mark.skipif(found < needed, reason=f"needs {needed} GPUs, found {found}"))


@pytest.fixture
def ranks(pools: Callable[[int], Pool]) -> Callable[..., list[Any]]:
    """`ranks(job, *arguments)`: what each of the two ranks returned."""

    def run(job: Callable[..., Any], *arguments: Any) -> list[Any]:
        return pools(WORLD).run(job, *arguments, deadline=COMPILING)

    return run
