"""The double of CUDA graphs finds what a GPU would punish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.graphs import Device
from zeroweave._torch.storages import at_address


def device() -> Device:
    made: Any = Device()
    reductions = SimpleNamespace(_flights=[])
    made._parts = SimpleNamespace(runtime=SimpleNamespace(buckets={}, gradients=SimpleNamespace(reductions=reductions)))
    return made  # type: ignore[no-any-return]


def test_a_replay_reads_what_is_there_now() -> None:
    on, x = device(), torch.ones(3)
    with on.graph() as graph:
        y = x * 2
    x.fill_(5.0)
    graph.replay()
    assert y.tolist() == [10.0] * 3


def test_memory_that_nobody_refers_to_is_overwritten() -> None:
    on, x = device(), torch.ones(3)
    with on.graph() as graph:
        kept = x + 1
        address = (x * 3).data_ptr()
    graph.replay()
    assert kept.tolist() == [2.0] * 3
    assert at_address(address, (3,), x.dtype, x.device).isnan().all()


def test_another_graph_finds_no_more_than_the_host_keeps() -> None:
    on, x = device(), torch.ones(3)
    with on.graph() as first:
        saved = x * 2
    with on.graph() as second:
        out = saved + 1
    first.replay()
    second.replay()
    assert out.tolist() == [3.0] * 3
    del saved  # as a GPU does not know: the capture of the first was over, and the memory in use
    first.replay()
    second.replay()
    assert out.tolist() == [3.0] * 3
    with on.graph() as third:  # it is captured when nobody refers to that memory, which is a stranger's then
        pass
    third.replay()
    second.replay()
    assert out.isnan().all()


def test_memory_that_was_given_up_is_an_error() -> None:
    on, x = device(), torch.ones(3)
    with on.graph() as graph:
        y = x * 2
    del x
    with pytest.raises(AssertionError, match="nobody's any more"):
        graph.replay()
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: torch.tensor([1.0]) + x])
def test_what_waits_for_the_device_ends_the_capture(wait: Any) -> None:
    with pytest.raises(RuntimeError, match="not permitted"), device().graph():
        wait(torch.ones(3))


def test_what_is_under_way_at_the_end_ends_the_capture() -> None:
    on: Any = device()
    bucket = SimpleNamespace(_pending=None, resident=False)
    on._parts.runtime.buckets[0] = bucket
    with pytest.raises(RuntimeError, match="unjoined"), on.graph():
        bucket._pending = object()
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        bucket._pending.wait()
