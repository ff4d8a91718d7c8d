"""These tests need two GPUs and NCCL; elsewhere they are skipped."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    skip = pytest.mark.skip(reason=f"needs {WORLD} GPUs, found {found}")
    for item in items:
        if found < WORLD and HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def ranks(pools: Callable[[int], Pool]) -> Callable[..., list[Any]]:
    """`ranks(job, *arguments)`: what each of the two ranks returned, every rank on a GPU of its own."""

    def run(job: Callable[..., Any], *arguments: Any) -> list[Any]:
        return pools(WORLD).run(job, *arguments, deadline=COMPILING)

    return run
