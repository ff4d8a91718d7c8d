"""Gathers behind updates that fail: the optimizer step is done to its end, and each error belongs to its own step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from zeroweave.runtime.executor import Executor
from zeroweave.schedule import Regather, Update


class Bucket:
    """Is asked to gather anew, or that what it has is not good any more."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._error = error

    def regather(self) -> None:
        self.asked.append("regather")
        if self._error is not None:
            raise self._error

    def expire(self) -> bool:
        self.asked.append("expire")
        return True


def executor_of(*buckets: Any) -> Executor:
    nothing: Any = None
    return Executor(dict(enumerate(buckets)), nothing, nullcontext, None, None)


def test_updates_go_on_behind_it_and_nothing_else_is_gathered() -> None:
    """Other ranks gather in turn: a later gather would meet their first one."""
    buckets, updated = [Bucket(MemoryError("no memory is left")), Bucket(), Bucket()], list[int]()
    instructions = [each for bucket in range(3) for each in (Update(bucket), Regather(bucket))]
    with pytest.raises(MemoryError, match="no memory"):
        executor_of(*buckets).finish(instructions, updated.extend)
    assert updated == [0, 1, 2]
    assert [each.asked for each in buckets] == [["regather"], ["expire"], ["expire"]]


def test_the_error_of_one_step_is_not_that_of_the_next() -> None:
    executor = executor_of(Bucket(MemoryError("no memory is left")), Bucket())

    def update(buckets: Sequence[int]) -> None:
        if 1 in buckets:
            raise RuntimeError("the optimizer fails")

    with pytest.raises(RuntimeError, match="the optimizer fails") as raised:
        executor.finish([Update(0), Regather(0), Update(1)], update)
    (note,) = raised.value.__notes__
    assert "a gather behind an update failed: MemoryError" in note  # it may be the reason
    executor.finish([Update(0)], update)


def test_an_error_that_was_raised_keeps_no_frames() -> None:
    """Nor does one that another error came behind."""

    class Large:
        pass

    def fails(executor: Executor, error: type[Exception]) -> weakref.ref[Large]:
        large = Large()  # of the program

        def update(buckets: Sequence[int]) -> None:
            if error is KeyError and buckets == [1]:
                raise KeyError("another")

        with pytest.raises(error):
            executor.finish([Update(0), Regather(0), Update(1)], update)
        return weakref.ref(large)

    class Failing(Bucket):
        def regather(self) -> None:
            raise MemoryError("no memory is left")

    executor = executor_of(Failing(), Bucket())
    found = [fails(executor, error) for error in (MemoryError, KeyError)]
    gc.collect()
    assert [each() for each in found] == [None, None]
