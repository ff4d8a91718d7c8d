"""Between host memory and the device: tensors that live in the one, and copies that run beside the computation.

    upload     host → device, on a stream of its own; whoever needs the copy waits for it on the device
    download   device → host, on another one, behind what the current stream has been given so far

No copy makes the host wait. A tensor in host memory (`HostTensor`) remembers the last copy from or to it, and the
next one waits for that on its stream. Code of the host itself calls `finish` before it reads or writes one. Device
copies are allocated on the stream that asks for them, and are referred to until that stream has waited for all that
reads or writes them. So their memory is the computation's own, before and after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple

import torch

from zeroweave.comm.clock import Clock, Mark
from zeroweave.comm.gauge import Gauge
from zeroweave.comm.pending import beside
from zeroweave.comm.transport import Pending, Transport
from zeroweave.layout import BucketLayout


class CopyStream:
    """Copies from and to one device, which run in the order of their issue.

    Device memory on either side of a copy must stay until the compute stream has waited for it (`wait`); pinned memory
    need not, as PyTorch uses it again only when the copies that it is part of are over. `stream`: None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] in host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self.stream is not None)

    def issue(self) -> AbstractContextManager[None]:
        """What is copied inside comes after everything that the current stream has been given so far."""
        return beside(self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between two tensors of one shape and dtype, one on the device; inside of `issue`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what has been issued so far, for `wait`."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What the current stream is given from now on comes after a mark: inside of `issue`, the copies."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """The host waits for everything that has been issued."""
        if self.stream is not None:
            self.stream.synchronize()


_CALLS: Final = 8
"""So many calls of the next forward may begin before the compute stream waits for the last downloads of a step."""


class HostTensor:
    """A 1-D tensor in host memory, pinned where the device is a GPU."""

    __slots__ = ("copied", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.copied: torch.cuda.Event | None = None
        """the end of the last copy from or to it"""

    def busy_until(self, mark: torch.cuda.Event | None) -> None:
        """It is copied from or to; the copy is over at `mark`."""
        self.copied = mark


class Upload:
    """Copies on the device, on their way; to be waited for, because until then nobody may free them."""

    __slots__ = ("_tensors", "event")

    def __init__(self, tensors: tuple[torch.Tensor, ...], event: torch.cuda.Event | None) -> None:
        self._tensors, self.event = tensors, event

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, which the current stream may use from here on. To be called once."""
        if self.event is not None:
            self.event.wait()
        tensors, self._tensors = self._tensors, ()
        return tensors


class Download(NamedTuple):
    """What is to be copied to host memory: a tensor [n], to the elements from `start` on."""

    tensor: torch.Tensor
    host: HostTensor
    start: int = 0


class _Leaving:
    """Device tensors that a download reads: the stream that they belong to has to wait before they are freed."""

    __slots__ = ("event", "stream", "tensors")

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event, tensors: list[torch.Tensor]) -> None:
        self.stream, self.event, self.tensors = stream, event, tensors


class _Gathering:
    """A gather of shards of which this rank's own is uploaded first."""

    __slots__ = ("_event", "_inner", "_over", "_staged")

    def __init__(
        self, inner: Pending, event: torch.cuda.Event | None, staged: torch.Tensor, over: Callable[[int], None]
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

    `issuing` is the scope of what is to count as a part of a gather.
    """

    def __init__(self, device: torch.device, issuing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.device, self._issuing = device, issuing
        self.staged = Gauge()
        self._up, self._down = CopyStream(device), CopyStream(device)
        self._leaving: deque[_Leaving] = deque()
        self._calls = 0
        self._together = False

    def zeros(self, numel: int, dtype: torch.dtype) -> HostTensor:
        """A new tensor [numel] in host memory."""
        return HostTensor(self._up.zeros(numel, dtype))

    # ------------------------------------------------------------------ copies
    @torch.no_grad()
    def upload(self, hosts: Sequence[HostTensor]) -> Upload:
        """Starts to copy tensors to the device."""
        copies = tuple(torch.empty(h.tensor.shape, dtype=h.tensor.dtype, device=self.device) for h in hosts)
        with self._up.issue():  # behind whatever may still use the memory of what was freed
            for host, copy in zip(hosts, copies, strict=True):
                self._up.wait(host.copied)
                self._up.copy(copy, host.tensor)
            mark = self._up.mark()
        for host in hosts:
            host.busy_until(mark)
        return Upload(copies, mark)

    @torch.no_grad()
    def download(self, copies: Sequence[Download]) -> None:
        """Starts to copy tensors to host memory, in order. Nobody may write them from now on."""
        if not copies:
            return
        with self._down.issue():
            for tensor, host, start in copies:
                self._down.wait(host.copied)
                self._down.copy(host.tensor[start : start + tensor.numel()], tensor)
            mark = self._down.mark()
        for _, host, _ in copies:
            host.busy_until(mark)
        if mark is None:  # the copies are over
            return
        current = torch.cuda.current_stream(self.device)
        self._leaving.append(_Leaving(current, mark, [tensor for tensor, _, _ in copies]))
        self._calls = 0
        self.retire(2)

    def retire(self, most: int) -> None:
        """Lets at most so many downloads keep their device tensors: the stream of the oldest waits for the others."""
        while len(self._leaving) > most:
            oldest = self._leaving.popleft()
            oldest.stream.wait_event(oldest.event)

    def sweep(self) -> None:
        """Called as calls begin: frees the device tensors of downloads that are over.

        The host is ahead of the device and may find none over that will be, so after some calls the stream waits.
        """
        if not self._leaving:
            return
        self._calls += 1
        while self._leaving and (self._calls > _CALLS or self._leaving[0].event.query()):
            self.retire(len(self._leaving) - 1)

    def finish(self) -> None:
        """The host waits for all copies: it may read and write what lies in its memory from here on."""
        self._up.finish()
        self._down.finish()
        self.retire(0)

    # ------------------------------------------------------------------ gathers
    @contextmanager
    def together(self, transport: Transport) -> Iterator[None]:
        """The scope of `Transport.together`: its gathers are launched at the end, on the stream current there."""
        with transport.together():
            self._together = True
            try:
                yield
            finally:
                self._together = False

    def gather(self, transport: Transport, flat: torch.Tensor, shard: HostTensor, layout: BucketLayout) -> Pending:
        """Uploads this rank's shard and starts the all-gather behind that; see `Transport.all_gather`.

        The copy on the device goes when the gather has been waited for.
        """
        event = None
        with self._issuing():
            upload = self.upload([shard])
            if (stream := self._up.stream) is None or self._together:
                (staged,) = upload.wait()
                pending = transport.all_gather(flat, staged, layout)
            else:
                with torch.cuda.stream(stream):  # which the collective waits for, and the computation does not
                    (staged,) = upload.wait()
                    pending = transport.all_gather(flat, staged, layout)
                    event = self._up.mark()
        self.staged.add(staged.nbytes)
        return _Gathering(pending, event, staged, self.staged.add)


class UploadingGatherer:
    """Gathers through `transport` what lies in host memory: each gather uploads `host` first."""

    def __init__(self, transfers: Transfers, transport: Transport, host: HostTensor) -> None:
        self._transfers, self._transport, self._host = transfers, transport, host

    def all_gather(self, flat: torch.Tensor, shard: torch.Tensor, layout: BucketLayout) -> Pending:
        """See `Transport.all_gather`; `shard` is what `host` holds."""
        return self._transfers.gather(self._transport, flat, self._host, layout)
