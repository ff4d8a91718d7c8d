"""CUDA streams, captures that fail, and the memory of graphs."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Final

import torch

_HERTZ: Final = 2_000_000_000
"""Of GPUs' clocks, roughly: some are slower, and wait longer."""
_RELEASES_BY_ITSELF: Final = (2, 13)
"""The first version whose graphs may give back the pool of a capture that has failed."""


def end_failed_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Ends the capture of `graph`, which has failed, on the capturing stream, which is the current one.

    `pool`: that of `capture_begin`. Why: where the driver refuses to end a capture, PyTorch 2.11 leaves it at that. Its
    allocator continues as if the capture ran: no block that several streams have used comes back, no cached block
    is given to another size, the pool cannot be captured into, and keeps its memory forever. The generator of random
    numbers refuses to draw any. A capture that succeeds sets that right, as nothing else does.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):
        graph.pool()  # it has one if its capture was ended, even with an error: it gives that back itself
        return
    with suppress(RuntimeError):  # newer versions have done so
        torch._C._cuda_endAllocateToPool(device.index, pool)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _RELEASES_BY_ITSELF:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(device.index, pool)
    nothing, sound = torch.zeros((), device=device), torch.cuda.CUDAGraph()
    sound.capture_begin(capture_error_mode="thread_local")
    nothing.zero_()
    sound.capture_end()


def free_workspaces() -> None:
    """Frees the workspaces of cuBLAS, which makes others when it needs them.

    Why: it keeps one for each stream, up to 64 MiB. That of a captured stream lies in the pool of its graphs, and would
    stay there when these are gone. Other graphs may still write there: before what their pool puts there later.
    """
    torch._C._cuda_clearCublasWorkspaces()


def unused_bytes(pool: tuple[int, int]) -> int:
    """Bytes of the pool of that id that no tensor has.

    Why: up to PyTorch 2.13 `torch.cuda.memory_snapshot` gives up a reference to each object that it is asked with, and
    none is its own (PyTorch's pull request 196366). A number above 256 is freed at once, while the id has it, and the
    process ends sooner or later. So each gets a reference that can be given up. Once PyTorch gives up none, the few
    numbers stay.
    """
    for given in (*pool, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(given))
    segments = torch.cuda.memory_snapshot(pool, include_traces=False)
    return sum(int(segment["total_size"]) - int(segment["allocated_size"]) for segment in segments)


def busy_wait(seconds: float, device: torch.device) -> None:
    """The current stream of a GPU waits. Why: no public operation takes a given time."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _HERTZ))
