"""The device, as graphs need it: captures, random numbers, room."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from zeroweave._torch.graphs import end_failed_capture, unused_bytes
from zeroweave.engine.graphs.fills import Fills
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.graphs.numbers import DRAWS, HostNumbers
from zeroweave.optim.room import Room

_FAILS_TOO: Final = "previous error during capture"
"""CUDA's words for whatever comes behind an error in a capture."""


class Graph(Protocol):
    """What the device was given once."""

    def replay(self) -> None:
        """The device is given it again."""


class Capturer:
    """Captures for one engine. Its graphs share a pool of memory, because no two of its windows are open at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fills = Fills.if_possible(device)
        self._pool = torch.cuda.graph_pool_handle()
        # Of its own, because work on the default stream cannot be captured.
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def graph(self) -> Iterator[Graph]:
        """What the device is given inside becomes the graph; nothing is executed."""
        graph, pool = torch.cuda.CUDAGraph(keep_graph=self._fills is not None), self._pool
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads, such as those of the backend, may ask for things that are forbidden inside of a capture.
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield graph
                graph.capture_end()
            except BaseException:
                end_failed_capture(graph, pool, self._device)
                raise
            if self._fills is not None:
                self._fills.replace(graph.raw_cuda_graph())
                graph.instantiate()

    @contextmanager
    def alone(self, first: bool) -> Iterator[None]:
        """Around captures. The graphs have memory of their own, so what is cached goes first.

        `first`: of the graphs so far none is left. They have given their pool up then: PyTorch takes it for one that
        can go, which it cannot as long as a library keeps something there, and refuses to capture into it.

        Uncapturable at the end if random numbers of the CPU were drawn inside: a graph would repeat them for ever. They
        come again as they would have without what was done inside.
        """
        self.finish()
        torch.cuda.empty_cache()
        if first:
            self._pool = torch.cuda.graph_pool_handle()
        numbers, more = torch.get_rng_state(), HostNumbers()
        with _no_garbage():
            try:
                yield
                drawn = more.drawn or not torch.equal(numbers, torch.get_rng_state())
            finally:
                torch.set_rng_state(numbers)
                more.restore()
        if drawn:
            raise Uncapturable(DRAWS)

    @property
    def random(self) -> torch.Tensor:
        """The state of the device's random numbers, in host memory."""
        return torch.cuda.get_rng_state(self._device)

    def resume_random(self, state: torch.Tensor) -> None:
        """They come as they came from that state on."""
        torch.cuda.set_rng_state(state, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that no tensor has. Replays use them, and nobody else can."""
        return unused_bytes(self._pool)

    def spare(self, peak: int) -> int:
        """Bytes on the device beside what a step takes, and its graphs, which have memory of their own. Local.

        `peak`: bytes that were in use at most.
        """
        busy = peak - torch.cuda.memory_allocated(self._device)
        return (Room.now(self._device).device or 0) - 2 * busy - busy // 4

    def finish(self) -> None:
        """The host waits for the device."""
        torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """Memory that was given up goes back to where others can have it."""
        torch.cuda.empty_cache()
        if (empty_host_cache := getattr(torch.accelerator, "empty_host_cache", None)) is not None:
            empty_host_cache()  # not in all versions


def first_of(error: BaseException) -> BaseException:
    """What has ended a capture, where `error` came of something that was tried afterwards, and fails then, too."""
    while _FAILS_TOO in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Inside, no garbage is collected: it may free what has been captured, or wait for the device."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
