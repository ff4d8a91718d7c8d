"""The stream on which an engine computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class ComputeStream:
    """The stream of the last outermost forward; on a CPU there is one order and no stream.

    Autograd delivers a leaf's gradient on the stream on which the leaf's `AccumulateGrad` node was made. That node
    outlives its forward where a graph is kept, so it may belong to another stream than the present forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def begin_forward(self) -> None:
        """The engine computes on the current stream from now on."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def receive(self, gradient: torch.Tensor) -> AbstractContextManager[object]:
        """Inside, the compute stream is current and waits for the stream that was, on which `gradient` was made."""
        if self._stream is None or (current := torch.cuda.current_stream(self._device)) == self._stream:
            return nullcontext()
        self._stream.wait_stream(current)
        gradient.record_stream(self._stream)  # rare, and simpler than keeping it until it is reduced
        return torch.cuda.stream(self._stream)
