"""Copies between device memory and host memory, beside what the device computes.

On a GPU the host memory is pinned and the copies run on a stream of their own: nothing here waits on the host. On the
CPU the same calls copy at once, between two pieces of plain memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Copies:
    """The copies of one device, which run in the order of their issue.

    Memory on either side of a copy must stay until the compute stream has waited for it (`wait`); pinned memory need
    not, as PyTorch uses it again only when the copies that it is part of are over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    @contextmanager
    def issue(self) -> Iterator[None]:
        """Copies inside come after everything that the compute stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between two tensors of one shape and dtype, one on the device; inside of `issue`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what has been issued so far, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What the compute stream is given from now on comes after a mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)
