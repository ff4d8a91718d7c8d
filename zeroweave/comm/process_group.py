"""Transports over a process group (gloo on CPU, NCCL on GPU), and the one for a world of 1."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroweave._torch.distributed import (
    all_gather,
    all_gather_together,
    new_process_group,
    reduce_scatter,
)
from zeroweave._torch.storages import lent
from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.ledger import Ledger, dtype_name
from zeroweave.comm.pending import SideWork, on_side, side_of
from zeroweave.comm.rounding import cast_
from zeroweave.comm.transport import Messages, Parts, Pending, ReduceOp, Spread, lay_out
from zeroweave.errors import EngineError, RankFailure
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.ranks.control import Control
from zeroweave.ranks.start import connect_gloo, local_gpu


class _Work:
    """The latest collective in `ledger`, and what must stay alive until it has been waited for."""

    __slots__ = ("_alive", "_count", "_ledger", "_on_host", "_waited", "_work")

    def __init__(self, work: dist.Work | _Launch, ledger: Ledger, on_host: bool, *alive: torch.Tensor) -> None:
        self._work: dist.Work | _Launch | None = work
        self._ledger, self._count, self._on_host = ledger, ledger.count, on_host
        self._alive: tuple[torch.Tensor, ...] = alive
        self._waited: Callable[[], None] | None = None

    def wait(self) -> None:
        # A second wait on a gloo reduce-scatter would copy the result again, over later changes to it.
        if self._work is None:
            raise RuntimeError("a collective was waited for twice")
        _await(self._work.wait, self._ledger, self._count, self._on_host)
        self._work, self._alive = None, ()
        if self._waited is not None:
            self._waited()

    def over(self, clock: Clock) -> Mark:
        assert self._work is not None
        return clock.after(self._work.wait, self._tell)

    def _tell(self, stamp: Callable[[], None]) -> None:
        assert isinstance(self._work, dist.Work)
        try:
            self._work.get_future().add_done_callback(lambda _: stamp())
        except RuntimeError:  # gloo's reduce-scatter does its last part in `wait`, and does not tell before
            self._waited = stamp


def _await(wait: Callable[[], object], ledger: Ledger, count: int, on_host: bool) -> None:
    """Waits for collective number `count`. RankFailure for an error of the backend in place of its result."""
    ledger.waits(count)
    try:
        wait()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankFailure(f"'{ledger.text_at(count)}' did not come to its end: {reason}") from None
    if on_host:
        ledger.came()


def _tensors_of(parts: Parts) -> Iterable[torch.Tensor]:
    """The tensors that must stay alive while the parts are reduced."""
    return (parts,) if isinstance(parts, torch.Tensor) else parts.values()


class _Launch:
    """Gathers that are issued together, at the end of the scope in which they were asked for."""

    def __init__(self) -> None:
        self._gathers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """of each its output and its input, and the shard that this is, or is still to be made of"""
        self._work: dist.Work | None = None

    def gather(self, output: torch.Tensor, mine: torch.Tensor, shard: torch.Tensor) -> None:
        self._gathers.append((output, mine, shard))

    def issue(self, group: dist.ProcessGroup) -> None:
        for _, mine, shard in self._gathers:
            if mine is not shard:
                cast_(mine, shard)
        if self._gathers:
            outputs, inputs, _ = zip(*self._gathers, strict=True)
            self._work = all_gather_together(list(outputs), list(inputs), group)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


class ProcessGroupTransport:
    """Collectives of one process group, that of the sharding group `name`, counted in a ledger.

    What the backend is handed is lent: its threads hold tensors for longer than a collective takes, and these must not
    count as users of a storage. Shards are not lent: their users are not counted, and most stay for good.

    Reductions divide by `divisor` (None: the ranks of the group). `in_place`: shards that need no cast, too, are copied
    into the flat and gathered from there.

    NCCL runs them on its own stream, which waits for the stream that issued them; gloo runs them on its own threads.
    On a GPU, casts and copies that prepare a collective run on a side stream, concurrently with the computation.
    `Pending.wait` orders the current stream after all of it, so that memory may be freed or written from then on.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        ledger: Ledger,
        name: str = WORLD,
        divisor: int | None = None,
        in_place: bool = False,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self.device, self.ledger = device, ledger
        self.rank, self.world = group.rank(), group.size()
        self._name, self._divisor, self._in_place = name, divisor or self.world, in_place
        self._side = side_of(device, priority=-1)
        self._launches = device.type == "cuda"
        """True if it can issue several collectives at once; gloo has no launch to save"""
        self._launch: _Launch | None = None
        self._on_host = device.type == "cpu"
        """True if the result is there once the host has waited"""

    def close(self) -> None:
        """Drops the group, so that it ends when its owner destroys it, however long this object is kept.

        The threads of a gloo group that is kept until the interpreter has ended may still drop the last tensors then,
        which aborts the process.
        """
        self._group = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; EngineError after `close`."""
        if self._group is None:
            raise EngineError(
                "nothing is gathered or reduced any more: the engine was closed, or its process ends. What the process "
                "does with it at its end has to be registered behind zeroweave.initialize (atexit.register)"
            )
        return self._group

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    @contextmanager
    def together(self) -> Iterator[None]:
        if not self._launches:
            yield
            return
        launch = self._launch = _Launch()
        try:
            yield
        finally:
            self._launch = None
        with torch.no_grad(), on_side(self._side):
            launch.issue(self.group)

    def _count(self, kind: str, tensor: torch.Tensor, bucket: int) -> None:
        self.ledger.record(kind, bucket, dtype_name(tensor.dtype), tensor.nbytes, self._name, self.world)

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        self._count("all_gather", flat, layout.id)
        target, mine = lent(flat), shard
        as_it_is = shard.dtype == flat.dtype and not self._in_place
        if not as_it_is:
            start, stop = layout.shard_range(self.rank)
            mine = target[start:stop]
        work: dist.Work | _Launch
        if self._launch is not None:
            work = self._launch
            work.gather(target, mine, shard)
        elif as_it_is:
            work = all_gather(target, mine, self.group)
        else:
            with on_side(self._side):
                work = all_gather(target, cast_(mine, shard), self.group)
        return _Work(work, self.ledger, self._on_host, flat, shard)

    def _prepare(self, flat: torch.Tensor, op: ReduceOp) -> dist.ReduceOp.RedOpType:
        """Makes a flat ready for a reduction; returns what the collective has to do."""
        if self._divisor == 1:
            return dist.ReduceOp.SUM
        if op == "average":
            if self._divisor != self.world:
                flat.div_(self._divisor / self.world)
            return dist.ReduceOp.AVG
        flat.div_(self._divisor)
        return dist.ReduceOp.SUM

    def reduce_scatter(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        with torch.no_grad(), on_side(self._side):
            if isinstance(parts, torch.Tensor) and parts.dtype == out.dtype:
                flat = parts
            else:
                flat = self.empty(layout.numel, out.dtype)
                lay_out(flat, parts, layout)
            kind = self._prepare(flat, op)
            self._count("reduce_scatter", flat, layout.id)
            chunks = layout.chunks
            if min(chunks) != max(chunks):
                inputs = list(lent(flat).split(list(chunks)))
                work = dist.reduce_scatter(lent(out), inputs, op=kind, group=self.group, async_op=True)
            else:
                work = reduce_scatter(lent(out), lent(flat), kind, self.group)
        return _Work(work, self.ledger, self._on_host, flat, out, *_tensors_of(parts))

    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        with torch.no_grad(), on_side(self._side):
            lay_out(out, parts, layout)
            kind = self._prepare(out, op)
            self._count("all_reduce", out, layout.id)
            work = dist.all_reduce(lent(out), op=kind, group=self.group, async_op=True)
        return _Work(work, self.ledger, self._on_host, out, *_tensors_of(parts))

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        bucket, payload, sent, received = messages
        self.ledger.record("all_to_all", bucket, dtype_name(mine.dtype), payload, self._name, self.world)
        work = dist.all_to_all_single(lent(out), lent(mine), list(received), list(sent), self.group, async_op=True)
        assert work is not None
        return _Work(work, self.ledger, self._on_host, out, mine)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        self._count("broadcast", tensor, -1)
        self._wait_for(partial(dist.broadcast, lent(tensor), group_src=source, group=self.group))

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        self._count("all_reduce", tensor, -1)
        self._wait_for(partial(dist.all_reduce, lent(tensor), group=self.group))

    def _wait_for(self, collective: Callable[[], object]) -> None:
        """The latest collective waits for itself."""
        _await(collective, self.ledger, self.ledger.count, self._on_host)


class LocalTransport:
    """A group of one rank: copies instead of collectives, and nothing in the ledger.

    Reductions divide by `divisor`.
    """

    rank = 0
    world = 1

    def __init__(self, device: torch.device, divisor: int = 1) -> None:
        self.device, self._divisor = device, divisor

    def close(self) -> None:
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        cast_(flat, shard)
        return SideWork()

    @torch.no_grad()
    def all_reduce(self, out: torch.Tensor, parts: Parts, layout: Spread, op: ReduceOp) -> Pending:
        lay_out(out, parts, layout)
        if self._divisor != 1:
            out.div_(self._divisor)
        return SideWork()

    reduce_scatter = all_reduce  # this rank's part is all of it

    def all_to_all(self, out: torch.Tensor, mine: torch.Tensor, messages: Messages) -> Pending:
        out.copy_(mine)
        return SideWork()

    def broadcast(self, tensor: torch.Tensor, source: int = 0, group: str = WORLD) -> None:
        return None

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        return None


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the ranks of a group compute: the local GPU where the group has NCCL, or is None; else the CPU."""
    if torch.cuda.is_available() and (group is None or _backends_of(group).get("cuda") == "nccl"):
        return local_gpu()
    return torch.device("cpu")


def take_device(group: dist.ProcessGroup | None) -> torch.device:
    """`device_of` the group, which becomes the current device: NCCL sends objects by way of that."""
    device = device_of(group)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """By the type of a device, the name of its backend. `get_backend` says "undefined" where a program names none."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def own_group(
    group: dist.ProcessGroup | None, control: Control, timeout: timedelta, groups: int = 1, consecutive: bool = False
) -> dist.ProcessGroup | None:
    """A new communicator over the ranks of `group` (None: all), those of `control`, which tells them its name.

    `timeout`: of its collectives. With `groups`, that many of them: each rank's is the one of its number, see
    `layout`, which also says what `consecutive` means. None where that is a group of one rank. Collective over the
    ranks of `group`; other ranks need not take part. `end_process_group` ends it, before the control group is closed.
    """
    if control.world == groups:
        return None
    size, name = control.world // groups, control.broadcast_object(f"zeroweave {uuid.uuid4()}")
    number = control.rank // size if consecutive else control.rank % groups
    ranks = dist.get_process_group_ranks(group)
    ranks = ranks[number * size :][:size] if consecutive else ranks[number::groups]
    place = f"collectives of {groups}.{number}" + ", consecutive" * consecutive
    backend, attempt = _backends_of(group)[device_of(group).type], itertools.count()

    def make(store: Store, timeout: timedelta) -> dist.ProcessGroup:
        return new_process_group(ranks, backend, store, f"{name}.{number}.{next(attempt)}", timeout)

    with control.meeting(place) as store:
        if backend == "gloo":
            own = connect_gloo(store, ranks.index(dist.get_rank()), size, timeout, make)
        else:
            own = make(store, timeout)
    control.barrier("the start of the collectives")
    return own


def make_transport(
    group: dist.ProcessGroup | None,
    device: torch.device,
    ledger: Ledger,
    name: str = WORLD,
    divisor: int | None = None,
) -> ProcessGroupTransport | LocalTransport:
    """The transport over `group`, that of the sharding group `name`; None or a group of one rank needs no collectives.

    `divisor`: of its reductions; None: the ranks of the group. To be closed before the group is destroyed.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalTransport(device, divisor or 1)
    return ProcessGroupTransport(group, device, ledger, name, divisor)
