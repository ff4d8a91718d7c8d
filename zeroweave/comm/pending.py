"""Work beside the computation: on a stream of its own, and waited for once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zeroweave.comm.clock import Clock, Mark


def beside(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """On `stream`, after everything that the current one was given so far; None: on the CPU, which has one order."""
    return nullcontext() if stream is None else _behind(stream)


@contextmanager
def _behind(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


class Beside:
    """What ends with an event of another stream (None: it is over), and what must stay alive until it is waited for."""

    __slots__ = ("_alive", "_event", "_waited")

    def __init__(self, event: torch.cuda.Event | None = None, *alive: torch.Tensor) -> None:
        self._event, self._alive = event, alive
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            raise RuntimeError("a collective was waited for twice")
        self._waited = True
        if self._event is not None:
            self._event.wait()
        self._alive = ()

    def over(self, clock: Clock) -> Mark:
        return clock.mark() if self._event is None else clock.after(self._event.wait)
