"""Segments grow while a capture runs only; the memory of a pool is asked for without losing the pool's numbers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from zeroweave._torch.graphs import growing_segments, pool_segments


class Allocator:
    """What PyTorch's makes of settings: each forgets the sizes of those before, and keeps whether segments grow."""

    def __init__(self, settings: str) -> None:
        self.grows = False
        self.set(settings)

    def set(self, settings: str) -> None:
        self.settings = settings
        pairs = dict(pair.split(":") for pair in settings.split(",") if pair)
        self.split = pairs.get("max_split_size_mb")
        self.grows = pairs.get("expandable_segments", str(self.grows)) == "True"


Standing = Callable[[str], Allocator]


@pytest.fixture(params=[True, False], ids=["settings can be asked for", "settings are part of a snapshot"])
def allocator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Standing:
    def standing_for(settings: str) -> Allocator:
        made = Allocator(settings)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.set)
        if request.param:
            monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: made.settings, raising=False)
        else:
            monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
            found = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": made.settings}}
            monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: found)
        return made

    return standing_for


@pytest.mark.parametrize(
    "before", ["", "max_split_size_mb:200", "garbage_collection_threshold:0.5,max_split_size_mb:99"]
)
def test_segments_grow_inside_only(allocator: Standing, before: str) -> None:
    found = allocator(before)
    split = found.split
    for divisor in (1, 1, 0):
        with pytest.raises(ZeroDivisionError) if divisor == 0 else nullcontext(), growing_segments():
            assert found.grows and found.split == split
            _ = 1 / divisor
        assert not found.grows and found.settings == before and found.split == split


@pytest.mark.parametrize("chosen", ["expandable_segments:True", "expandable_segments:False", "backend:cudaMallocAsync"])
def test_a_program_that_has_decided_about_segments_is_left_alone(allocator: Standing, chosen: str) -> None:
    found = allocator(chosen)
    with growing_segments():
        assert found.settings == chosen
    assert found.settings == chosen


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
