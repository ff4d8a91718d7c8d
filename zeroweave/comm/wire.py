"""The way of an engine's collectives: the transport that communicates, within the wrappers that are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroweave.comm.clock import Clock, clock_of
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.transport import Transport
from zeroweave.comm.wrappers import Skipping, Timed, Timing


class Wire:
    """A transport whose methods are those of the outermost wrapper that is on, or of `inner` itself.

    A wrapper that is off costs nothing and is not called: timing and skipping begin and end between steps. So code that
    issues collectives keeps the wire, and none of its methods, which may be others in the next step.

    `paired`: a wrapper that stays, see `Paired`; None: there is none. `planned` counts what would have been sent since
    the last switch to skipping; nothing in a world of 1.
    """

    def __init__(
        self,
        inner: Transport,
        device: torch.device,
        clock: Clock | None = None,
        paired: Callable[[Transport], Transport] | None = None,
    ) -> None:
        """`clock`: by which collectives are timed; None: that of `device`."""
        self.rank, self.world = inner.rank, inner.world
        self.clock = clock or clock_of(device)
        self.planned = Ledger(self.world, self.rank)
        self._inner, self._device, self._paired = inner, device, paired
        self._timed: Timed | None = None
        self._skipping: Skipping | None = None
        self._connect()

    def _connect(self) -> None:
        outermost: Transport = self._timed or self._inner
        if self._paired is not None:
            outermost = self._paired(outermost)
        if self._skipping is not None:
            outermost = self._skipping
        self.empty = outermost.empty
        self.all_gather, self.broadcast = outermost.all_gather, outermost.broadcast
        self.reduce_scatter, self.all_reduce = outermost.reduce_scatter, outermost.all_reduce
        self.all_reduce_sum, self.all_to_all = outermost.all_reduce_sum, outermost.all_to_all

    @property
    def skips(self) -> bool:
        """True while steps are only tried out: ranks agree on nothing, and nothing is decided by what they show."""
        return self._skipping is not None

    def skip(self, on: bool) -> None:
        """Nothing is issued from now on, with a new `planned`, or all is again.

        Equally on all ranks, while nothing is under way.
        """
        if on:
            self.planned = Ledger(self.world, self.rank)
        self._skipping = Skipping(self._inner, self._device, self.planned) if on else None
        self._connect()

    def time(self, log: list[Timing] | None) -> None:
        """Gathers and reduce-scatters are noted in `log` from now on, in the order of their issue; None: no more."""
        self._timed = None if log is None else Timed(self._inner, self.clock, log)
        self._connect()

    def issuing(self) -> AbstractContextManager[None]:
        """The scope of what counts as a part of a gather; see `Timed.issuing`."""
        return nullcontext() if self._timed is None else self._timed.issuing()

    def wrap(self, wrapper: Callable[[Transport], Transport]) -> None:
        """Puts a wrapper around what communicates, for good: to try out another speed."""
        self._inner = wrapper(self._inner)
        self.time(None)
