"""Between host memory and the device: tensors in host memory, and copies that run concurrently with the computation.

    upload     host → device, on its own stream; the stream that needs the copy waits for it
    download   device → host, on another stream, after the work that the current stream has been given so far
    snapshot   what tensors hold now, for another thread to read in host memory while they change

No copy makes the host wait. A tensor in host memory (`HostTensor`) remembers the last copy from or to it, and the
next one waits for that on its stream. Code of the host itself calls `finish` before it reads or writes one. Device
copies are allocated on the stream that asks for them, and are referred to until that stream has waited for all that
reads or writes them. So their memory is the computation's own, before and after.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from zeroweave._torch.storages import versions
from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.transport import Pending, Transport
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout
from zeroweave.runtime.copies import CopyStream
from zeroweave.runtime.slack import Slack


class HostTensor:
    """A 1-D tensor in host memory, pinned where the device is a GPU."""

    __slots__ = ("copied", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.copied: torch.Event | None = None
        """the end of the last copy from or to it"""

    def busy_until(self, mark: torch.Event | None) -> None:
        """It is copied from or to; the copy is over at `mark`."""
        self.copied = mark


class Upload:
    """Copies on the device, on their way; to be waited for, because until then their memory must not be freed."""

    __slots__ = ("_sources", "_tensors", "_versions", "event")

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], event: torch.Event | None, sources: Sequence[torch.Tensor] = ()
    ) -> None:
        self._tensors, self.event = tensors, event
        self._sources, self._versions = tuple(sources), versions(sources)

    @property
    def outdated(self) -> bool:
        """True if what was copied has been written since, as autograd counts writes."""
        return versions(self._sources) != self._versions

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, which the current stream may use from here on. To be called once."""
        if self.event is not None:
            self.event.wait()
        tensors, self._tensors = self._tensors, ()
        return tensors


class Download(NamedTuple):
    """A copy to host memory: of a tensor [n], to the elements from `start` on."""

    tensor: torch.Tensor
    host: HostTensor
    start: int = 0


class Snapshot:
    """The values of tensors at this moment, for another thread, although the tensors will change.

    The owner calls `start` some time before it changes them, and `arrive` just before. The other thread calls `read`,
    once. Device tensors are copied concurrently with the computation, between `start` and `arrive`. Host tensors are
    read in place; those not yet read at `arrive` are copied then. Each copy is dropped once it is read.

    The snapshot is lost if a tensor is written unannounced, or if no memory is left for a copy; see `lost`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copies: CopyStream) -> None:
        self._tensors: list[torch.Tensor | None] = list(tensors)
        self._sources = tuple(tensors)
        """until `arrive`: their memory must not be reused while they are copied"""
        self._versions = versions(tensors)
        self._lost: Exception | None = None
        self._copies = copies
        self._originals = {index for index, tensor in enumerate(tensors) if tensor.device.type == "cpu"}
        """those that are read in place"""
        self._started = len(self._originals) == len(tensors)
        self._mark: torch.Event | None = None
        self._next = 0
        """the first that has not been read to its end"""
        self._reading = self._dropped = False
        self._changed = threading.Condition()

    @torch.no_grad()
    def start(self) -> None:
        """Starts the copies of the device tensors; does nothing the second time."""
        with self._changed:
            if not self._started:
                with self._losing():
                    self._copy()
                    self._started = True
                self._changed.notify_all()

    def _copy(self) -> None:
        away = {n: t for n, t in enumerate(self._tensors) if t is not None and n not in self._originals}
        host = self._copies.empty(sum(_aligned(tensor.nbytes) for tensor in away.values()))
        begin = 0
        with self._copies.issue():
            for index, tensor in away.items():
                copy = host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                self._copies.copy(copy, tensor)
                self._tensors[index] = copy
                begin += _aligned(tensor.nbytes)
            self._mark = self._copies.mark()

    @torch.no_grad()
    def arrive(self) -> None:
        """The tensors may change from here on: by what the current stream is given, and by the host."""
        self._copies.wait(self._mark)
        self.lost()
        self._sources = ()
        with self._changed:
            reading = self._next
            with self._losing():
                for index in sorted(self._originals):
                    tensor = self._tensors[index]
                    if tensor is not None and not (self._reading and index == reading):
                        self._tensors[index] = tensor.clone()
                        self._originals.discard(index)
            # At most one is left: the one that is being read.
            self._changed.wait_for(lambda: self._dropped or not (self._reading and self._next in self._originals))

    def read(self) -> Iterator[torch.Tensor]:
        """The tensors, in host memory, each until the next is asked for. Ends if dropped; raises why it is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._dropped)
        self._copies.reach(self._mark)
        try:
            for index in range(len(self._versions)):
                with self._changed:
                    if self._is_over():
                        return
                    tensor, self._reading = self._tensors[index], True
                assert tensor is not None
                yield tensor
                del tensor
                with self._changed:
                    if self._is_over():
                        return
                    self._tensors[index], self._reading, self._next = None, False, index + 1
                    self._changed.notify_all()
        finally:
            self.drop()

    def _is_over(self) -> bool:
        if self._lost is not None:
            raise self._lost
        return self._dropped

    def lost(self) -> Exception | None:
        """Why it is lost, if it is. Called by the owner, which changes the tensors."""
        if any(now != known for now, known in zip(versions(self._sources), self._versions, strict=False)):
            self._lose(
                EngineError(
                    "parameters or optimizer state were written behind save() and before the next update, and not by "
                    "the engine: write them with engine.set_full or engine.set_local, or in engine.full_parameters()"
                )
            )
        return self._lost

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Inside, memory is allocated. If there is none, the snapshot is lost, and the owner continues.

        Any other exception, such as Ctrl-C, leaves it half copied: then it is lost as well.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self._lose(error)
        except BaseException as error:
            self._lose(EngineError(f"{type(error).__name__} while it was copied for a checkpoint"))
            raise

    def _lose(self, reason: Exception) -> None:
        self._lost = self._lost or reason
        self.drop()

    def drop(self) -> None:
        """It is not needed any more; called in any thread."""
        with self._changed:
            self._dropped = self._started = True
            self._tensors = []
            self._originals.clear()
            self._changed.notify_all()


def _aligned(nbytes: int) -> int:
    """Rounds up, so that a tensor of any dtype can begin after it."""
    return -(-nbytes // 16) * 16


class _Leaving(NamedTuple):
    """Device tensors that a download reads: the stream that they belong to has to wait before they are freed."""

    stream: Any
    event: torch.Event
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class _Gathering:
    """A gather of shards of which this rank's own is uploaded first."""

    __slots__ = ("_event", "_inner", "_over", "_staged")

    def __init__(
        self, inner: Pending, event: torch.Event | None, staged: torch.Tensor, over: Callable[[int], None]
    ) -> None:
        self._inner, self._event, self._over = inner, event, over
        self._staged: torch.Tensor | None = staged

    def wait(self) -> None:
        self._inner.wait()
        assert self._staged is not None
        if self._event is not None:
            self._event.wait()  # a transport that copies on the current stream did so on that of the upload
        self._over(-self._staged.nbytes)
        self._staged = None

    def over(self, clock: Clock) -> Mark:
        return self._inner.over(clock)


class Transfers:
    """The copies of one engine. `staged` counts the bytes of parameters that are on the device to be gathered.

    `issuing` is the scope of work that counts as a part of a gather. `streams` makes the copy streams. `fills`: see
    `Slack`.
    """

    def __init__(
        self,
        device: torch.device,
        issuing: Callable[[], AbstractContextManager[None]] = nullcontext,
        streams: Callable[[torch.device], CopyStream] = CopyStream,
        fills: bool = False,
    ) -> None:
        self.device, self._issuing = device, issuing
        self.staged = Gauge()
        self._up, self._down, self._aside = streams(device), streams(device), streams(device)
        self._leaving: deque[_Leaving] = deque()
        self.slack = Slack(self._up.in_use, self._up.capacity, fills)
        self._held: deque[Sequence[Download]] = deque()
        """those of `download_later` that have not begun"""
        self._quiet = False
        """True until the next call has begun: none of them begins before"""
        self._any = False
        """true once anything has been downloaded"""
        self._ahead: Callable[[], bool] | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> HostTensor:
        """A new tensor [numel] in host memory."""
        return HostTensor(self._up.zeros(numel, dtype))

    # ------------------------------------------------------------------ copies
    @torch.no_grad()
    def upload(self, hosts: Sequence[HostTensor]) -> Upload:
        """Starts to copy tensors to the device."""
        if self._held and not {id(h) for h in hosts}.isdisjoint(id(copy.host) for one in self._held for copy in one):
            self._begin_held()
        copies = tuple(torch.empty(h.tensor.shape, dtype=h.tensor.dtype, device=self.device) for h in hosts)
        with self._up.issue():  # after all work that may still use freed memory
            for host, copy in zip(hosts, copies, strict=True):
                self._up.wait(host.copied)
                self._up.copy(copy, host.tensor)
            mark = self._up.mark()
        for host in hosts:
            host.busy_until(mark)
        return Upload(copies, mark, [host.tensor for host in hosts])

    def now(self) -> torch.Event | None:
        """The end of what the current stream has been given so far; None on the CPU."""
        return self._up.now()

    def download_later(self, copies: Sequence[Download]) -> None:
        """Starts to copy tensors to host memory during the calls that follow, or when one of them is needed there.

        The GPU copies to the host in order, so a program that reads a value waits for all that has begun. As a rule it
        reads its loss behind the update, and models of transformers look at their masks behind their first call.
        """
        self._held.append(copies)
        self._quiet = True
        self.slack.add(sum(copy.tensor.nbytes for copy in copies))

    def _begin_held(self, most: int | None = None) -> None:
        """Starts copies of `download_later`: those of `most` requests, the oldest first; None: all."""
        for _ in range(len(self._held) if most is None else min(most, len(self._held))):
            copies = self._held.popleft()
            self.slack.add(-sum(copy.tensor.nbytes for copy in copies))
            self.download(copies)

    @torch.no_grad()
    def download(self, copies: Sequence[Download]) -> None:
        """Starts to copy tensors to host memory, in order. They must not be written from now on."""
        if not copies:
            return
        with self._down.issue():
            for tensor, host, start in copies:
                self._down.wait(host.copied)
                self._down.copy(host.tensor[start : start + tensor.numel()], tensor)
            mark = self._down.mark()
        for _, host, _ in copies:
            host.busy_until(mark)
        self._any = True
        if mark is None:  # the copies are over
            return
        leaving = _Leaving(self._down.current(), mark, [tensor for tensor, _, _ in copies])
        self._leaving.append(leaving)
        self.slack.add(leaving.nbytes)
        self._retire_for(0, most=2)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> Snapshot:
        """The present values of these tensors. To be called when the host may read host tensors (`finish`).

        Its copies have their own stream, so that nothing else has to wait for them.
        """
        return Snapshot(tensors, self._aside)

    def make_room(self, nbytes: int, most: int) -> None:
        """Frees the tensors of the oldest downloads until there is room for `nbytes`, or `most` downloads are left."""
        if self.slack.room <= nbytes:
            self._begin_held()
        self._retire_for(nbytes, most)

    def _retire_for(self, nbytes: int, most: int) -> None:
        while len(self._leaving) > most and self.slack.room <= nbytes:
            self._retire()

    def _retire(self) -> None:
        """Frees the device tensors of the oldest download: the stream that they belong to waits for it."""
        oldest = self._leaving.popleft()
        oldest.stream.wait_event(oldest.event)
        self.slack.add(-oldest.nbytes)

    def run_ahead(self, lift: Callable[[], bool]) -> None:
        """As calls of this backward begin, `lift` may begin uploads in its slack, until it returns False."""
        self._ahead = lift
        self.slack.begin_backward()

    def stand(self, whole: bool) -> None:
        """No more uploads begin in a backward. `whole`: it has come to its end."""
        self._ahead = None
        self.slack.end_backward(whole)

    def sweep(self) -> None:
        """Called as calls begin: frees the device tensors of downloads that are over, and begins uploads.

        The host is ahead of the device and may find none over that will be. So the stream waits for them once there is
        no room.
        """
        if not self._any and self._ahead is None:
            return
        self._begin_held(0 if self._quiet else 1)
        self._quiet = False
        self.slack.call_begins()
        while self._leaving and (self._leaving[0].event.query() or self.slack.room <= 0):
            self._retire()
        if self._ahead is not None and not self._ahead():
            self._ahead = None

    def finish(self) -> None:
        """The host waits for all copies: it may read and write host tensors from here on."""
        self._begin_held()
        self._up.finish()
        self._down.finish()
        while self._leaving:
            self._retire()

    # ------------------------------------------------------------------ gathers
    def gather(self, transport: Transport, flat: torch.Tensor, shard: HostTensor, layout: BucketLayout) -> Pending:
        """Uploads this rank's shard and starts the all-gather after it; see `Transport.all_gather`.

        The device copy is dropped when the gather has been waited for.
        """
        with self._issuing():
            upload = self.upload([shard])
            # The collective waits for the stream of the upload, and the computation does not.
            with self._up.here():
                (staged,) = upload.wait()
                pending = transport.all_gather(flat, self._up.lend(staged), layout)
                event = self._up.mark()
        self.staged.add(staged.nbytes)
        return _Gathering(pending, event, staged, self.staged.add)


class UploadingGatherer:
    """Gathers a shard in host memory through `transport`: each gather uploads `host` first."""

    def __init__(self, transfers: Transfers, transport: Transport, host: HostTensor) -> None:
        self._transfers, self._transport, self._host = transfers, transport, host

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        """See `Transport.all_gather`; `shard` is what `host` holds."""
        return self._transfers.gather(self._transport, flat, self._host, layout)
