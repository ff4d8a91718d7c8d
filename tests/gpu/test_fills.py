"""Small fills of captured graphs are kernels, with the bytes that memset nodes would have written."""

from __future__ import annotations

from collections import Counter
from typing import Any

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


def filled(bytes_at: torch.Tensor) -> None:
    """Memsets of elements of 1, 2 and 4 bytes on the current stream, each with another value; the last one is large."""
    from cuda.bindings import driver

    stream, at = driver.CUstream(torch.cuda.current_stream().cuda_stream), bytes_at.data_ptr()
    for error in (
        driver.cuMemsetD8Async(at, 0xAB, 8, stream),
        driver.cuMemsetD16Async(at + 64, 0xBEEF, 6, stream),
        driver.cuMemsetD32Async(at + 128, 0xDEADBEEF, 1024, stream),
        driver.cuMemsetD32Async(at + 8192, 0xCAFEBABE, 1, stream),
        driver.cuMemsetD8Async(at + 16384, 7, 3, stream),  # no whole word
        driver.cuMemsetD32Async(at + 32768, 5, 1025, stream),
    ):
        assert error[0] == driver.CUresult.CUDA_SUCCESS


def test_the_same_bytes_are_written() -> None:
    torch.cuda.set_device(DEVICE)
    wanted, found = (torch.zeros(65536, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    filled(wanted)
    plain = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(plain):
        filled(found)
    assert kinds(plain) == {"MEMSET": 6}
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
    with Capturer(DEVICE).graph() as graph:
        for i in range(3):
            counter.copy_(large.sum().reshape(1))
            counter.zero_()
            seen[i].copy_(counter[0] + large[i])
    assert kinds(graph)["MEMSET"] == 0
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert seen.tolist() == [1.0] * 3
        seen.fill_(-1.0)


def test_matmuls_are_what_they_were() -> None:
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    a, b = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) / 64 for _ in range(2))

    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.nn.functional.silu(x @ b + 1)
        return x

    wanted = work(a)
    torch.cuda.synchronize()
    with Capturer(DEVICE).graph() as graph:
        found = work(a)
    assert kinds(graph)["MEMSET"] == 0
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)
