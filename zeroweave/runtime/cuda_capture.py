"""Captures of graphs of calls on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroweave._torch.cuda import end_failed_capture, free_workspaces, unused_bytes
from zeroweave._torch.storages import unfilled


class CudaCapture:
    """See `graph_recording.Capture`. All memory comes from one pool, in the order of one stream, which shares it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # the default stream cannot be captured
        self._unit = 0
        """bytes that tensors had at most, in addition to those that are alive between units"""
        self._grown = True
        """True if the pool may be larger than when it was last measured"""
        self._open_pool()

    def _open_pool(self) -> None:
        self._pool = torch.cuda.MemPool()
        self._handle: Any = self._pool.id
        # PyTorch's host allocator lets no graph into a pool that had graphs and has none: this one stays.
        self._first, _ = self.capture(lambda args: args[0].zero_(), [torch.zeros((), device=self._device)])

    def capture(self, run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        self._grown = True
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            try:
                # Other threads may use the device meanwhile.
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                results = run(args)
                graph.capture_end()
            except BaseException:
                end_failed_capture(graph, self._handle, self._device)
                raise
        current.wait_stream(self._stream)
        return graph, results

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._grown = True
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self._device):
            return unfilled(numel, dtype, self._device)

    def has_room(self) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        now = torch.cuda.memory_allocated(self._device)
        pool, self._grown = self.nbytes if self._grown else 0, False
        self._unit = max(self._unit, pool, torch.cuda.max_memory_allocated(self._device) - now)
        return min(free + torch.cuda.memory_reserved(self._device), allowed) - now >= 2 * self._unit

    def make_room(self) -> None:
        torch.cuda.empty_cache()

    def clear(self) -> None:
        self.close()
        self._open_pool()
        torch.cuda.empty_cache()

    def close(self) -> None:
        del self._first, self._pool
        free_workspaces()

    @property
    def nbytes(self) -> int:
        return unused_bytes(self._handle)


def capture_for(device: torch.device) -> CudaCapture | None:
    """The capture of such a device; None if it has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None
