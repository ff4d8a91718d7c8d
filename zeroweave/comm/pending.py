"""Work concurrent with the computation: on its own stream, and waited for once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from zeroweave.comm.clock import Clock, Mark


class Side:
    """A second stream next to the computation's. Work issued inside follows all that the current stream was given.

    Not to be entered inside itself.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        torch.cuda.init()  # the device-independent classes do not initialize CUDA
        self.stream = torch.Stream(device=device, priority=priority)
        self._device = device
        self._fork = torch.Event(device=device)

    def __enter__(self) -> None:
        self._fork.record(torch.accelerator.current_stream(self.stream.device_index))
        self.stream.wait_event(self._fork)
        self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.__exit__(kind, error, trace)

    def pending(self, *alive: torch.Tensor) -> SideWork:
        """The end of all that was issued here so far."""
        event = torch.Event(device=self._device)
        event.record(self.stream)
        return SideWork(event, *alive)


def side_of(device: torch.device, priority: int = 0) -> Side | None:
    """A second stream on `device`; None on the CPU, which has one order."""
    return Side(device, priority) if device.type == "cuda" else None


def on_side(side: Side | None) -> AbstractContextManager[None]:
    """Inside, work is issued on that stream; None: on the CPU."""
    return nullcontext() if side is None else side


class SideWork:
    """Work that ends with an event of another stream (None: it is over), and tensors that stay alive until the wait."""

    __slots__ = ("_alive", "_event", "_waited")

    def __init__(self, event: torch.Event | None = None, *alive: torch.Tensor) -> None:
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
