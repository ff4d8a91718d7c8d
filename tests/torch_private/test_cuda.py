"""The memory of a pool is asked for without losing the pool's numbers."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

from zeroweave._torch.cuda import unused_bytes


@pytest.mark.parametrize("gives_up", [True, False], ids=["a version that gives references up", "one that does not"])
def test_the_numbers_of_a_pool_outlive_every_snapshot(monkeypatch: pytest.MonkeyPatch, gives_up: bool) -> None:
    reads, pool = 100, (0, int("1" + "0" * 20))  # not one of the small numbers that Python keeps
    spare = [pool[1]] * reads  # what a failure of this test takes; without them the process would end
    asked: list[tuple[Any, ...]] = []

    def snapshot(given: tuple[Any, ...]) -> dict[str, Any]:
        asked.append(given)
        for each in given if gives_up else ():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
        return {"segments": [{"total_size": 2, "allocated_size": 1}]}

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot, raising=False)
    before, false = sys.getrefcount(pool[1]), sys.getrefcount(False)
    for _ in range(reads):
        assert unused_bytes(pool) == 1
    assert set(asked) == {(*pool, False)}
    asked.clear()
    now = sys.getrefcount(pool[1])
    assert now == before if gives_up else now >= before
    assert sys.getrefcount(False) > false - reads // 2  # others use it, too
    assert len(spare) == reads
