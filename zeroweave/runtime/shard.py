"""A bucket's shard: the master, what is gathered of it, and where both live.

             master (`values`, `put`)              source (what is gathered)
on device    one tensor, rounded as it is gathered
split        its bfloat16 and a remainder          the bfloat16: one tensor
master off   host memory                           device memory, in the dtype of the computation
both off     host memory                           host memory, the same tensor where the dtypes are the same

In a group of one rank a source on the device is the flat, too, where it has the flat's dtype.
Around an update a master that is no tensor of the device is lifted there, and lowered afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zeroweave.comm.rounding import cast, cast_, join_, split_
from zeroweave.comm.transport import Gatherer, Transport
from zeroweave.layout import BucketLayout
from zeroweave.runtime.transfers import Download, HostTensor, Transfers, Upload, UploadingGatherer


def whole(at_rest: Sequence[torch.Tensor]) -> torch.Tensor:
    """The master of a shard, or of an equal part of each tensor that it holds `at_rest`: itself, or a new one [n]."""
    if len(at_rest) == 1:
        return at_rest[0]
    source, remainder = at_rest
    return join_(torch.empty(source.shape, dtype=torch.float32, device=source.device), source, remainder)


class Shard:
    """This rank's part [numel / world] of a bucket, gathered in `dtype`.

    The master of trained parameters has at least float32: the optimizer updates it, and it is rounded to make the
    source. `master_off`: the master is in host memory if it is wider than the source; `source_off`: all is.
    `remainder`: a float32 master of bfloat16 on the device is kept as its source and a remainder, see `comm.rounding`,
    of this dtype: int16, or int8, which has no room for 8 bits of it.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        transport: Transport,
        transfers: Transfers,
        master_off: bool = False,
        source_off: bool = False,
        remainder: torch.dtype | None = None,
    ) -> None:
        self.wider = wider = layout.trainable and dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
        """True if the master is rounded to be gathered"""
        self._dtype, self._transport, self._transfers = dtype, transport, transfers
        self._numel = layout.shard_numel
        self._kind = remainder if wider and dtype == torch.bfloat16 else None
        """the dtype of the remainder, if the master is to be split"""
        self._host: HostTensor | None = None
        """the master's, if it is in host memory"""
        self._host_source: HostTensor | None = None
        self._remainder: torch.Tensor | None = None
        """what the source lacks, if the master is split"""
        self.movable = wider and master_off and not source_off
        """True if the master can be in either memory"""
        kind = torch.float32 if wider else dtype
        if source_off or self.movable:
            self._host = transfers.zeros(self._numel, kind)
            self.master = self._host.tensor
        elif self._kind is not None:
            self.master = self._split(self._kind)
        else:
            self.master = transport.empty(self._numel, kind)
        """without memory at rest if it is split: it has memory while it is lifted"""
        self.source = self.master
        """in host memory or on the device"""
        self.gatherer: Gatherer = transport
        """through which the source is gathered"""
        if source_off:
            self._host_source = transfers.zeros(self._numel, dtype) if wider else self._host
            assert self._host_source is not None
            self.source = self._host_source.tensor
            self.gatherer = UploadingGatherer(transfers, transport, self._host_source)
        elif self.movable or self._kind is not None:
            self.source = transport.empty(self._numel, dtype)
        self._before: torch.Tensor | None = None
        """the source's values while the program may write them, see `part`"""

    def can_be_flat(self, world: int) -> bool:
        """True if the source may share the memory of the flat, in a group of so many ranks."""
        return world == 1 and not self.movable and not self.source_on_host and self.source.dtype == self._dtype

    def part(self) -> None:
        """Until `unite`, `values` are those of now, even if the source, which is the flat, is written."""
        self._before = self.source.clone()

    def unite(self, restore: bool) -> None:
        """The source has its own values from now on: what was written, or, to `restore`, those of before `part`."""
        if restore and self._before is not None:
            self.source.copy_(self._before)
        self._before = None

    def _split(self, kind: torch.dtype) -> torch.Tensor:
        """A master that is split from now on."""
        device = self._transfers.device
        self._remainder = torch.zeros(self._numel, dtype=kind, device=device)
        master = torch.empty(self._numel, dtype=torch.float32, device=device)
        master.untyped_storage().resize_(0)
        return master

    @property
    def on_host(self) -> bool:
        """True if the master is in host memory."""
        return self._host is not None

    @property
    def at_hand(self) -> bool:
        """True if the master is a tensor on the device. Otherwise it is lifted around an update."""
        return self._host is None and self._remainder is None

    @property
    def source_on_host(self) -> bool:
        return self._host_source is not None

    def rounded(self) -> torch.Tensor:
        """The values to gather [numel / world], on the device and in their dtype: the source, or a copy."""
        uploaded = None if self._host_source is None else self._transfers.upload([self._host_source]).wait()[0]
        return cast(self.source if uploaded is None else uploaded, self._dtype)

    @property
    def at_rest(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the master while it is not lifted."""
        return (self.master,) if self._remainder is None else (self.source, self._remainder)

    @property
    def saves(self) -> int:
        """Device bytes that a movable master saves while it is in host memory."""
        return self._numel * (self.master.itemsize - self._dtype.itemsize)

    def lift(self) -> Upload:
        """Starts to bring a master that is not `at_hand` to the device: one tensor, to be written and lowered."""
        if self._host is not None:
            return self._transfers.upload([self._host])
        self.master.untyped_storage().resize_(self.master.nbytes)
        try:
            join_(self.master, *self.at_rest)
        except BaseException:  # there may be no memory for intermediate results
            self.master.untyped_storage().resize_(0)
            raise
        return Upload((self.master,), None)

    def cut(self, ranges: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
        """Views of the master, by start and stop; if it has no memory at rest, they have none then either."""
        storage = self.master.untyped_storage()
        has_memory = storage.nbytes() >= self.master.nbytes
        if not has_memory:
            storage.resize_(self.master.nbytes)
        views = [self.master[start:stop] for start, stop in ranges]
        if not has_memory:
            storage.resize_(0)
        return views

    def values(self) -> torch.Tensor:
        """The master on the device: itself, or a copy."""
        if self._host is not None:
            return self.lift().wait()[0]
        return whole(self.at_rest if self._before is None else (self._before, *self.at_rest[1:]))

    def put(self, values: torch.Tensor) -> None:
        """Overwrites the master, and with it the source, by values on the device, which are not written any more."""
        if not self.at_hand:
            self._transfers.download(self.lower(values.detach().to(self.master.dtype)))
        elif values is not self.master:
            with torch.no_grad():
                self.master.copy_(values)

    def lower(self, values: torch.Tensor, random: torch.Tensor | None = None) -> list[Download]:
        """Sets a master that is not `at_hand`, and its source, to `values`; returns what must be downloaded for that.

        Tensors on the device have the values at once. `random`: rounds the bits that a remainder has no room for.
        """
        if self._host is None:
            assert self._remainder is not None
            split_(values, self.source, self._remainder, random)
            if values is self.master:
                values.untyped_storage().resize_(0)
            return []
        copies = [Download(values, self._host)]
        if self._host_source is None:
            cast_(self.source, values)
        elif self._host_source is not self._host:
            copies.append(Download(cast(values, self._dtype), self._host_source))
        return copies

    def move(self, on_host: bool) -> None:
        """Moves a movable master into the other memory. To be called while nothing is gathered."""
        assert self.movable
        if on_host == self.on_host:
            return
        values, self._remainder = self.values(), None
        if on_host:
            self._host = self._transfers.zeros(self._numel, values.dtype)
            self.master = self._host.tensor
            if self.source is values:
                self.source = self._transport.empty(self._numel, self._dtype)
            self.put(values)
        elif self._kind is not None:
            self._host, self.master = None, self._split(self._kind)
            self.put(values)
        else:
            self._host = None
            self.master = self.source = values
