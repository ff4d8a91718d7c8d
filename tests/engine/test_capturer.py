"""A capture that fails leaves PyTorch as it was: by stand-ins for its graphs and its allocator, as 2.11 has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from zeroweave.engine.graphs.capturer import Capturer, first_of
from zeroweave.engine.graphs.fills import Fills, NoFills


class Runtime:
    """What captures change of a process."""

    def __init__(self) -> None:
        self.underway: list[int] = []
        """the pools that the allocator takes captures to use"""
        self.uses: dict[int, int] = {}
        self.draws = True
        """can random numbers be drawn?"""
        self.handles = 0
        self.ends = True
        """does the driver end a capture?"""
        self.refuses = False
        """does it refuse to change a graph?"""

    def handle(self) -> int:
        self.handles += 1
        return self.handles

    def graph(self, keep_graph: bool = False) -> Graph:
        return Graph(self, keep_graph)

    def replace(self, graph: Graph) -> int:
        """as `Fills` does"""
        graph.events.append("replaced")
        if self.refuses:
            raise RuntimeError("the driver refuses")
        return 1

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: int) -> None:
        self.uses[pool] -= 1


class Graph:
    def __init__(self, runtime: Runtime, kept: bool) -> None:
        self._runtime, self._ended, self._pool, self._kept = runtime, False, 0, kept
        self.events: list[str] = []

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        runtime = self._runtime
        self._pool = runtime.handle() if pool is None else pool
        if self._pool in runtime.underway or runtime.uses.get(self._pool) == 0:
            raise RuntimeError("already recording to mempool_id, or it is given up")
        runtime.underway.append(self._pool)
        runtime.uses[self._pool] = runtime.uses.get(self._pool, 0) + 1
        runtime.draws = False

    def capture_end(self) -> None:
        runtime = self._runtime
        if not runtime.ends:
            runtime.ends = True
            raise RuntimeError("operation failed due to a previous error during capture")
        runtime.end(0, self._pool)
        runtime.draws = self._ended = True
        self.events.append("ended")

    def raw_cuda_graph(self) -> Graph:
        assert self._ended and self._kept
        return self

    def instantiate(self) -> None:
        assert self._ended and self._kept
        self.events.append("instantiated")

    def pool(self) -> int:
        if not self._ended:
            raise RuntimeError("without a preceding successful capture")
        return self._pool


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    stand_ins: dict[str, Any] = {
        "CUDAGraph": made.graph,
        "graph_pool_handle": made.handle,
        "Stream": lambda device: Mock(),
        "current_stream": lambda device=None: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(Fills, "on", lambda device: made)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    yield made


@pytest.mark.parametrize("ends", [True, False], ids=["the driver ends it", "the driver does not"])
def test_after_a_failed_capture_others_succeed(runtime: Runtime, ends: bool) -> None:
    capturer = Capturer(torch.device("cpu", 0))
    with capturer.alone(first=True), capturer.graph() as kept:
        pass
    runtime.ends = ends
    with pytest.raises(ZeroDivisionError), capturer.alone(first=False), capturer.graph():
        _ = 1 / 0
    assert not runtime.underway and runtime.draws
    pool = kept.pool()  # type: ignore[attr-defined]
    assert runtime.uses[pool] == (2 if ends else 1)  # a graph whose capture was ended gives its use back by itself
    with capturer.alone(first=False), capturer.graph() as other:
        pass
    assert other.pool() == pool  # type: ignore[attr-defined]


def test_a_graph_is_changed_between_its_capture_and_its_first_use(runtime: Runtime) -> None:
    capturer = Capturer(torch.device("cpu", 0))
    with capturer.alone(first=True), capturer.graph() as graph:
        pass
    assert graph.events == ["ended", "replaced", "instantiated"]  # type: ignore[attr-defined]
    runtime.refuses = True
    with pytest.raises(RuntimeError, match="the driver refuses"), capturer.alone(first=False), capturer.graph() as bad:
        pass
    assert bad.events == ["ended", "replaced"] and not runtime.underway and runtime.draws  # type: ignore[attr-defined]


def test_without_the_drivers_bindings_a_graph_stays_as_it_is(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: torch.device) -> None:
        raise NoFills("none")

    monkeypatch.setattr(Fills, "on", on)
    capturer = Capturer(torch.device("cpu", 0))
    with capturer.alone(first=True), capturer.graph() as graph:
        pass
    assert graph.events == ["ended"]  # type: ignore[attr-defined]


def test_a_pool_that_all_graphs_have_given_up_is_not_used_again(runtime: Runtime) -> None:
    capturer = Capturer(torch.device("cpu", 0))
    pools = []
    for _ in range(2):
        with capturer.alone(first=True), capturer.graph() as graph:
            pass
        pools.append(graph.pool())  # type: ignore[attr-defined]
        runtime.uses[pools[-1]] = 0
    assert pools[0] != pools[1]


def test_what_fails_behind_an_error_is_not_told_in_its_place() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise ValueError("the model's own")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    assert str(first_of(caught.value)) == "the model's own"
    with pytest.raises(ValueError) as other:
        try:
            raise KeyError("looked up")
        except KeyError:
            raise ValueError("refused") from None
    assert first_of(other.value) is other.value
