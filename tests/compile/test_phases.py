"""Where compilation's time goes, and who compiles what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import fx

from tests.compile.comparing import WIDTH, Stack, rows
from tests.compile.fakes import FakeHost
from tests.support.marks import slow
from zeroweave.compile import progress as phases_module
from zeroweave.compile.lower import compile_lock, graph_key
from zeroweave.compile.progress import Phases

pytestmark = pytest.mark.oldest


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(phases_module, "time", made)
    yield made


def test_a_phase_inside_another_counts_once(clock: Clock) -> None:
    phases = Phases()
    with phases("aot"):
        clock.now += 1
        with phases("partition"):
            clock.now += 2
        with phases("lower"):
            clock.now += 3
            with phases("wait"):
                clock.now += 4
        clock.now += 5
    with pytest.raises(KeyError), phases("aot"):
        clock.now += 10
        raise KeyError
    with phases("schedule"):
        clock.now += 20
    assert phases.seconds == {
        "dynamo": 0,
        "aot": 16,
        "partition": 2,
        "wait": 4,
        "lower": 3,
        "schedule": 20,
    }
    assert phases.total == 45


@slow("inductor")
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_phases_of_an_engine_grow_while_it_compiles_and_never_after(lower: str) -> None:
    host = FakeHost(Stack(), lower)
    seconds = host.templates.phases.seconds
    host.model(rows())
    forward = dict(seconds)
    assert all(forward[name] > 0 for name in ("dynamo", "aot", "partition", "lower")), forward
    host.model(rows()).sum().backward()
    both = dict(seconds)
    assert both["lower"] > forward["lower"] and both["dynamo"] == forward["dynamo"]
    host.model(rows()).sum().backward()
    assert seconds == both


def graph_of(scale: float = 2.0) -> fx.GraphModule:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * scale

    return fx.symbolic_trace(forward)


def test_equal_graphs_have_equal_keys() -> None:
    x = torch.ones(4, WIDTH)
    key = graph_key(graph_of(), [x, 3], "forward")
    assert key == graph_key(graph_of(), [torch.zeros(4, WIDTH), 3], "forward")
    others = [
        graph_key(graph_of(3.0), [x, 3], "forward"),
        graph_key(graph_of(), [x, 3], "backward"),
        graph_key(graph_of(), [x, 4], "forward"),
        graph_key(graph_of(), [x.t().contiguous().t(), 3], "forward"),
        graph_key(graph_of(), [x.double(), 3], "forward"),
        graph_key(graph_of(), [x.to("meta"), 3], "forward"),
        graph_key(graph_of(), [torch.ones(5, WIDTH), 3], "forward"),
    ]
    assert len({key, *others}) == 8


def lock_of(folder: Path) -> FileLock:
    return FileLock(folder / "zeroweave_key.lock", timeout=0)


def test_the_first_holds_the_lock_and_who_waited_does_not(tmp_path: Path) -> None:
    inside, waits, order = threading.Event(), threading.Event(), []

    class Waiting(Phases):
        def __call__(self, name: str) -> AbstractContextManager[None]:
            waits.set()
            return super().__call__(name)

    def first() -> None:
        with compile_lock(tmp_path, "key", Phases()):
            inside.set()
            waits.wait(60)
            order.append("first")

    def second() -> None:
        phases = Waiting()
        with compile_lock(tmp_path, "key", phases):
            order.append("second")
            with lock_of(tmp_path):  # nobody holds it
                order.append("third")
        assert phases.seconds["wait"] > 0 == phases.seconds["lower"]
        order.append("end")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(60)
    with compile_lock(tmp_path, "another key", Phases()):
        threads[1].start()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "second", "third", "end"]


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    phases = Phases()
    with lock_of(tmp_path), compile_lock(tmp_path, "key", phases, timeout=0.05):
        assert phases.seconds["wait"] > 0
    (tmp_path / "file").touch()
    with compile_lock(tmp_path / "file", "key", phases):
        pass
    with pytest.raises(KeyError), compile_lock(tmp_path, "key", phases):
        raise KeyError
    with lock_of(tmp_path):
        pass


def test_nobody_waits_for_what_was_compiled_before(tmp_path: Path) -> None:
    phases = Phases()
    with pytest.raises(KeyError), compile_lock(tmp_path, "key", phases):
        raise KeyError
    with compile_lock(tmp_path, "key", phases), pytest.raises(TimeoutError), lock_of(tmp_path):
        raise AssertionError("nothing was compiled before")
    with lock_of(tmp_path), compile_lock(tmp_path, "key", phases):
        pass
    assert phases.seconds["wait"] == 0
