"""Small fills of captured graphs are kernels, with the bytes that memset nodes would have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zeroweave.engine.graphs.capturer import Capturer

DEVICE = torch.device("cuda", 0)


def kinds(graph: Any) -> Counter[str]:
    """Its nodes, by type."""
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(handle)
    _, nodes, _ = driver.cuGraphGetNodes(handle, count)
    return Counter(driver.cuGraphNodeGetType(node)[1].name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in nodes)


def plainly(work: Callable[[], Any]) -> Counter[str]:
    """What PyTorch captures of it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    return kinds(graph)


def memsets(*each: tuple[str, int, int, int]) -> None:
    """A call of the driver with an address, a value and a number of elements, on the current stream."""
    from cuda.bindings import driver

    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    for name, at, value, count in each:
        (error,) = getattr(driver, name)(at, value, count, stream)
        assert error == driver.CUresult.CUDA_SUCCESS


def filled(bytes_at: torch.Tensor) -> None:
    """Memsets of elements of 1, 2 and 4 bytes, each with another value. No kernel can do the last two."""
    at = bytes_at.data_ptr()
    memsets(
        ("cuMemsetD8Async", at, 0xAB, 8),
        ("cuMemsetD16Async", at + 64, 0xBEEF, 6),
        ("cuMemsetD32Async", at + 128, 0xDEADBEEF, 1024),
        ("cuMemsetD32Async", at + 8192, 0xCAFEBABE, 1),
        ("cuMemsetD8Async", at + 16384, 7, 3),  # no whole word
        ("cuMemsetD32Async", at + 32768, 5, 1025),
    )


def test_the_same_bytes_are_written() -> None:
    torch.cuda.set_device(DEVICE)
    wanted, found = (torch.zeros(65536, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    filled(wanted)
    assert plainly(lambda: filled(found)) == {"MEMSET": 6}
    with Capturer(DEVICE).graph() as graph:
        filled(found)
    assert kinds(graph) == {"KERNEL": 4, "MEMSET": 2}
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted) and int(wanted.count_nonzero()) == 8 + 12 + 4096 + 4 + 3 + 1025


def test_each_is_behind_what_came_before_and_before_what_comes_behind() -> None:
    """A long kernel writes what is cleared, and another one reads it."""
    torch.cuda.set_device(DEVICE)
    counter, large = torch.ones(1, device=DEVICE), torch.ones(64 << 20, device=DEVICE)
    seen = torch.full((3,), -1.0, device=DEVICE)

    def work() -> None:
        for i in range(3):
            counter.copy_(large.sum().reshape(1))
            memsets(("cuMemsetD32Async", counter.data_ptr(), 0, 1))
            seen[i].copy_(counter[0] + large[i])

    work()  # what is loaded lazily is there before the captures
    assert plainly(work)["MEMSET"] >= 3
    with Capturer(DEVICE).graph() as graph:
        work()
    assert kinds(graph)["MEMSET"] == 0
    for _ in range(20):
        seen.fill_(-1.0)
        graph.replay()
        torch.cuda.synchronize()
        assert seen.tolist() == [1.0] * 3


def test_matmuls_are_what_they_were() -> None:
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    a, b = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) / 64 for _ in range(2))

    def work(x: torch.Tensor = a) -> torch.Tensor:
        for _ in range(8):
            x = torch.nn.functional.silu(x @ b + 1)
        return x

    wanted = work()
    torch.cuda.synchronize()
    if not plainly(work)["MEMSET"]:
        pytest.skip("this GPU's matmuls clear nothing")
    with Capturer(DEVICE).graph() as graph:
        found = work()
    assert kinds(graph)["MEMSET"] == 0
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)
