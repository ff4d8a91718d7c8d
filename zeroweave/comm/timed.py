"""Collectives whose times are taken; around the transport while a recording runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zeroweave.comm.around import Around
from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.transport import Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.layout import ACROSS, BucketLayout


@dataclass(frozen=True, slots=True)
class Timing:
    """One collective: when the stream that needs it came to its issue, and when it was over."""

    kind: str
    bucket: int
    issued: Mark
    over: Mark


class Timed(Around):
    """A transport that hands everything on to `inner` and notes gathers and reduce-scatters in `log`, as they come.

    Those across replicas are not noted: they belong to no `Unshard` and no `Reduce`.
    """

    def __init__(self, inner: Transport, clock: Clock, log: list[Timing]) -> None:
        super().__init__(inner)
        self._clock, self._log = clock, log
        self._begun: Mark | None = None

    def _note(self, kind: str, layout: Spread, issued: Mark, pending: Pending) -> Pending:
        if layout.group != ACROSS:
            self._log.append(Timing(kind, layout.id, issued, pending.over(self._clock)))
        return pending

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """A gather issued inside counts from the beginning: an upload that precedes it there is a part of it."""
        self._begun = self._clock.mark()
        try:
            yield
        finally:
            self._begun = None

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        issued = self._clock.mark() if self._begun is None else self._begun
        return self._note("all_gather", layout, issued, self._inner.all_gather(flat, shard, layout))

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        issued = self._clock.mark()
        return self._note("reduce_scatter", layout, issued, self._inner.reduce_scatter(out, parts, layout, op))
