"""The memory of a pool is asked for without losing the pool's numbers."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

from zeroweave._torch.graphs import pool_segments


@pytest.mark.parametrize("gives_up", [True, False], ids=["a version that gives references up", "one that does not"])
def test_the_numbers_of_a_pool_outlive_every_snapshot(monkeypatch: pytest.MonkeyPatch, gives_up: bool) -> None:
    pool = (0, int("1" + "0" * 20))  # not one of the small numbers that Python keeps
    asked = []

    def snapshot(given: tuple[Any, ...]) -> dict[str, Any]:
        asked.append(given[1])
        for each in given if gives_up else ():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
        return {"segments": [{"total_size": 2, "allocated_size": 1}]}

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot, raising=False)
    before = sys.getrefcount(pool[1])
    for _ in range(100):
        assert pool_segments(pool) == [{"total_size": 2, "allocated_size": 1}]
    assert all(each is pool[1] for each in asked)
    asked.clear()
    assert sys.getrefcount(pool[1]) == before if gives_up else sys.getrefcount(pool[1]) >= before
