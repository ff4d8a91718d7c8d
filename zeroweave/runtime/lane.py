"""Copies between device memory and host memory, beside what the device computes.

On a GPU the host memory is pinned and the copies run on a stream of their own: nothing here waits on the host. On the
CPU the same calls copy at once, between two pieces of plain memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """Copies from and to one device, which run in the order of their issue.

    Device memory on either side of a copy must stay until the compute stream has waited for it (`wait`); pinned memory
    need not, as PyTorch uses it again only when the copies that it is part of are over. `stream`: None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self.stream is not None)

    @contextmanager
    def issue(self) -> Iterator[None]:
        """What is copied inside comes after everything that the current stream has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between two tensors of one shape and dtype, one on the device; inside of `issue`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what has been issued so far, for `wait`."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What the current stream is given from now on comes after a mark: inside of `issue`, the copies."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """The host waits for everything that has been issued."""
        if self.stream is not None:
            self.stream.synchronize()
