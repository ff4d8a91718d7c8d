"""A whole training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.common import Trainer
from zeroweave._torch.cuda import unused_bytes

WARM = 3
"""Steps before the capture: kernels are compiled in the first, and libraries make their workspaces and connections."""


def trainer(step: Callable[[Sequence[Tensor]], Tensor], graphed: bool, device: torch.device, *notes: str) -> Trainer:
    """A Trainer of `step`: as one CUDA graph if `graphed`, else eagerly; its note has `notes`."""
    if graphed and device.type == "cuda":
        graph = StepGraph(step, device)
        return Trainer(graph, graph.details, graph.close, graph.held, "; ".join(notes) or None)
    missing = ["no CUDA graph: it needs a GPU"] if graphed else []
    return Trainer(step, note="; ".join([*notes, *missing]) or None)


class StepGraph:
    """Runs a step eagerly `WARM` times, captures it once, and replays it from then on.

    A step must leave nothing behind that the next one frees: it ends with the optimizer's step and without gradients.
    The loss that it returns is overwritten by the next step. The eager steps run on the stream that captures, so that
    autograd's nodes belong to it. NCCL's watchdog queries events in a thread of its own, so that only this thread's
    calls are checked during the capture.
    """

    def __init__(self, step: Callable[[Sequence[Tensor]], Tensor], device: torch.device) -> None:
        self._step = step
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._eager = 0
        self._replays = 0
        self._inputs: list[Tensor] = []
        """Of the captured step; empty before the capture."""
        self._loss: Tensor | None = None

    def __call__(self, batches: Sequence[Tensor]) -> Tensor:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._eager < WARM:
                self._eager += 1
                self._loss = self._step(batches)
            else:
                self._replay(batches)
        current.wait_stream(self._stream)
        assert self._loss is not None
        return self._loss

    def details(self) -> dict[str, Any]:
        return {"graphed_steps": self._replays}

    def held(self) -> int:
        """Bytes of the graph's memory that no tensor has."""
        return unused_bytes(self._graph.pool()) if self._inputs else 0

    def close(self) -> None:
        """Frees the graph. NCCL keeps a communicator as long as a graph has its collectives."""
        if self._inputs:
            torch.cuda.synchronize()
            self._loss = None
            self._graph.reset()
            self._inputs = []

    def _replay(self, batches: Sequence[Tensor]) -> None:
        if not self._inputs:
            inputs = [tokens.clone() for tokens in batches]
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._step(inputs)
            self._inputs = inputs
        for static, tokens in zip(self._inputs, batches, strict=True):
            static.copy_(tokens)
        self._graph.replay()
        self._replays += 1
