"""Wrappers around a transport: sharding groups, comparison, fences, times, and none of it issued; `Wire` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from zeroweave.comm.clock import Clock, Mark, clock_of
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.pending import SideWork, on_side, side_of
from zeroweave.comm.rounding import cast
from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, Transport
from zeroweave.config.sections import DebugConfig
from zeroweave.layout import ACROSS, INSIDE, WORLD, BucketLayout
from zeroweave.ranks.control import Control
from zeroweave.ranks.differ import next_collective


class Around:
    """A transport that hands all calls on to `inner`; a wrapper overrides what it changes.

    `_before` and `_after` surround every collective. `bucket`: its bucket's id, -1 for a tensor that is in none.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world = inner.rank, inner.world

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.empty(numel, dtype)

    def together(self) -> AbstractContextManager[None]:
        return self._inner.together()

    def _before(self, kind: str, bucket: int) -> None:
        """Called before a collective is issued."""

    def _after(self, kind: str, pending: Pending) -> Pending:
        """What the caller gets of an asynchronous collective that was issued."""
        return pending

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._before("all_gather", layout.id)
        return self._after("all_gather", self._inner.all_gather(flat, shard, layout))

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._before("reduce_scatter", layout.id)
        return self._after("reduce_scatter", self._inner.reduce_scatter(out, parts, layout, op))

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        self._before("all_reduce", layout.id)
        return self._after("all_reduce", self._inner.all_reduce(out, parts, layout, op))

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        self._before("all_to_all", messages.bucket)
        return self._after("all_to_all", self._inner.all_to_all(out, mine, messages))

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._before("broadcast", -1)
        self._inner.broadcast(tensor, source, group)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._before("all_reduce", -1)
        self._inner.all_reduce_sum(tensor)


class Grouped(Around):
    """Hands each collective to the transport of its layout's sharding group, in the order in which they are asked for.

    `transports`: by the group's name; that of "world" has all ranks, and all collectives without a group. A
    replicated flat is gathered across replicas first, then inside. The caller issues its reductions one by one, and
    adds up between them.
    """

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        super().__init__(transports[WORLD])
        self._transports = transports

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        if layout.replicas == 1:
            return self._transports[layout.group].all_gather(flat, shard, layout)
        near = torch.empty(layout.across.numel, dtype=flat.dtype, device=flat.device)
        self._transports[ACROSS].all_gather(near, shard, layout.across).wait()
        return self._transports[INSIDE].all_gather(flat, near, layout.inside)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._transports[layout.group].reduce_scatter(out, parts, layout, op)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._transports[layout.group].all_reduce(out, parts, layout, op)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._transports[group].broadcast(tensor, source)


class Paired(Around):
    """A transport that hands everything on to `inner` once all ranks of `control` are about to do the same.

    gloo ends the process that receives a message which is longer than its buffer, and pairs those that fit without an
    error. So ranks that may go different ways tell on the host which collective comes next, and learn there that they
    differ, all of them, while nothing is lost. It costs a short all-gather on the host per collective. NCCL does not
    need it: ranks that differ wait, and the alarm finds out.

    Raises AgreementError, on all ranks, where they differ, or where one does not come before the deadline.
    """

    def __init__(self, inner: Transport, control: Control, ledger: Ledger) -> None:
        super().__init__(inner)
        self._control, self._ledger = control, ledger

    def _before(self, kind: str, bucket: int) -> None:
        ledger = self._ledger
        name = ledger.name_of(bucket)
        self._control.barrier(next_collective(ledger.count + 1, ledger.call, ledger.module, kind, name))


class Fenced(Around):
    """A transport that waits before it issues a collective or until it has finished, as the switches say.

    Before: everything that was issued to the device has finished; on a CPU it always has. After: the collective has
    finished, on the device too, before the call returns. `all_reduce_sum` and `all_to_all` count as
    reductions; a broadcast has no switch.
    """

    def __init__(self, inner: Transport, device: torch.device, switches: DebugConfig) -> None:
        super().__init__(inner)
        self._device, self._switches = device, switches

    def together(self) -> AbstractContextManager[None]:
        waits = self._switches.sync_after_allgather or self._switches.sync_after_reduce
        return nullcontext() if waits else self._inner.together()

    def _before(self, kind: str, bucket: int) -> None:
        switches = self._switches
        if kind != "broadcast":
            self._synchronize(switches.sync_before_allgather if kind == "all_gather" else switches.sync_before_reduce)

    def _after(self, kind: str, pending: Pending) -> Pending:
        switches = self._switches
        if not (switches.sync_after_allgather if kind == "all_gather" else switches.sync_after_reduce):
            return pending
        pending.wait()
        self._synchronize(True)
        return SideWork()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        super().all_reduce_sum(tensor)
        self._synchronize(self._switches.sync_after_reduce)

    def _synchronize(self, now: bool) -> None:
        if now and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def fenced(transport: Transport, device: torch.device, switches: DebugConfig) -> Transport:
    """`transport`, with fences if any of the switches asks for them."""
    wanted = any(on for name, on in switches if name.startswith("sync_"))
    return Fenced(transport, device, switches) if wanted else transport


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


class Skipping(Around):
    """A transport in the place of `inner` that issues nothing at all.

    Skipped gathers fill the flat with copies of this rank's shard: real numbers, because processors draw less power
    on zeros, and are slow on denormals. A skipped all-to-all receives what this rank sends, over and over, or zeros
    where that is nothing. Skipped reductions give zeros; a skipped broadcast or `all_reduce_sum` leaves its tensor as
    it is. All are asynchronous as real ones are. `planned` counts what would have been sent;
    nothing in a world of 1.
    """

    def __init__(self, inner: Transport, device: torch.device, planned: Ledger) -> None:
        super().__init__(inner)
        self._planned = planned
        self._side = side_of(device)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._plan("all_gather", flat.dtype, flat.numel(), layout)
        with on_side(self._side), torch.no_grad():
            flat.view(layout.world, -1).copy_(cast(shard, flat.dtype))
        return self._filled(flat, shard)

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._zeros("reduce_scatter", out, layout)

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        return self._zeros("all_reduce", out, layout)

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        if self.world > 1:
            self._planned.record("all_to_all", messages.bucket, "uint8", messages.payload)
        with on_side(self._side), torch.no_grad():
            if mine.numel():
                out.copy_(mine.repeat(-(-out.numel() // mine.numel()))[: out.numel()])
            else:
                out.zero_()
        return self._filled(out, mine)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._plan("broadcast", tensor.dtype, tensor.numel())

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._plan("all_reduce", tensor.dtype, tensor.numel())

    def _zeros(self, kind: str, out: torch.Tensor, layout: Spread) -> Pending:
        self._plan(kind, out.dtype, layout.numel, layout)
        with on_side(self._side), torch.no_grad():
            out.zero_()
        return self._filled(out)

    def _plan(self, kind: str, dtype: torch.dtype, numel: int, layout: Spread | None = None) -> None:
        """`layout`: of a bucket; None: the tensor belongs to all ranks."""
        name, nbytes = dtype_name(dtype), numel * dtype.itemsize
        if layout is None and self.world > 1:
            self._planned.record(kind, -1, name, nbytes)
        elif layout is not None and layout.world > 1:
            self._planned.record(kind, layout.id, name, nbytes, layout.group, layout.world)

    def _filled(self, *alive: torch.Tensor) -> Pending:
        return SideWork() if self._side is None else self._side.pending(*alive)


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
        self.empty, self.together = outermost.empty, outermost.together
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
