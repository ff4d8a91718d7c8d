"""A bucket's shard: the master, what is gathered of it, and where both live.

                 master (`values`, `put`)              source (what is gathered)
on device        one tensor, rounded as it is gathered
split            its bfloat16 and a remainder          the bfloat16: one tensor
remainder off    the same, that in host memory         the bfloat16, in device memory
master off       host memory                           device memory, in the dtype of the computation
both off         host memory                           host memory, the same tensor where the dtypes are the same

In a group of one rank a source on the device is the flat, too, where it has the flat's dtype.
Around an update what is in host memory is on the device (`here`). A split master may be put together there (`join`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zeroweave.comm.rounding import cast, cast_, join_, split_
from zeroweave.comm.transport import Gatherer, Transport
from zeroweave.layout import BucketLayout
from zeroweave.runtime.transfers import Download, HostTensor, Transfers, UploadingGatherer


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
    of this dtype: int16, or int8, which has no room for 8 bits of it. With `master_off` it is in host memory.
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
        """the master's, or its remainder's, if that is in host memory"""
        self._host_source: HostTensor | None = None
        self._remainder: torch.Tensor | None = None
        """what the source lacks, if the master is split"""
        self.movable = wider and master_off and not source_off
        """True if the master, or its remainder, can be in either memory"""
        kind = torch.float32 if wider else dtype
        if source_off or (self.movable and self._kind is None):
            self._host = transfers.zeros(self._numel, kind)
            self.master = self._host.tensor
        elif self._kind is not None:
            self.master = self._split(self._kind, self.movable)
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
        stays = self.is_split or not self.movable
        return world == 1 and stays and not self.source_on_host and self.source.dtype == self._dtype

    def part(self) -> None:
        """Until `unite`, `values` are those of now, even if the source, which is the flat, is written."""
        self._before = self.source.clone()

    def unite(self, restore: bool) -> None:
        """The source has its own values from now on: what was written, or, to `restore`, those of before `part`."""
        if restore and self._before is not None:
            self.source.copy_(self._before)
        self._before = None

    def _split(self, kind: torch.dtype, off: bool = False) -> torch.Tensor:
        """A master that is split from now on; its remainder may be in host memory."""
        device = self._transfers.device
        if off:
            self._host = self._transfers.zeros(self._numel, kind)
            self._remainder = self._host.tensor
        else:
            self._remainder = torch.zeros(self._numel, dtype=kind, device=device)
        master = torch.empty(self._numel, dtype=torch.float32, device=device)
        master.untyped_storage().resize_(0)
        return master

    @property
    def hosts(self) -> tuple[HostTensor, ...]:
        """What of the tensors `at_rest` is in host memory: the last, or none."""
        return () if self._host is None else (self._host,)

    @property
    def is_split(self) -> bool:
        """True if the master is no tensor, but the source and a remainder."""
        return self._remainder is not None

    @property
    def at_hand(self) -> bool:
        """True if the master is a tensor on the device."""
        return not self.hosts and not self.is_split

    @property
    def source_on_host(self) -> bool:
        return self._host_source is not None

    def rounded(self) -> torch.Tensor:
        """The values to gather [numel / world], on the device and in their dtype: the source, or a copy."""
        uploaded = None if self._host_source is None else self._transfers.upload([self._host_source]).wait()[0]
        return cast(self.source if uploaded is None else uploaded, self._dtype)

    @property
    def at_rest(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the master between updates."""
        return (self.master,) if self._remainder is None else (self.source, self._remainder)

    @property
    def on_device(self) -> tuple[torch.Tensor, ...]:
        """What of the tensors `at_rest` is on the device."""
        return self.at_rest[: len(self.at_rest) - len(self.hosts)]

    @property
    def saves(self) -> int:
        """Device bytes that a movable master saves while it is in host memory."""
        away = self.master.itemsize - self._dtype.itemsize if self._remainder is None else self._remainder.itemsize
        return self._numel * away

    def here(self, come: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors `at_rest`, of which those of `hosts` have `come` to the device. They may be written."""
        return (*self.on_device, *come)

    def join(self, here: Sequence[torch.Tensor]) -> torch.Tensor:
        """The master as one tensor of the device, of what is `here`; to be written, and split."""
        if not self.is_split:
            return here[0]
        self.master.untyped_storage().resize_(self.master.nbytes)
        try:
            return join_(self.master, *here)
        except BaseException:  # there may be no memory for intermediate results
            self.drop()
            raise

    def split(self, here: Sequence[torch.Tensor], values: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Overwrites what is `here` of a split master. `random`: rounds the bits that a remainder has no room for."""
        if self.is_split:
            source, remainder = here
            split_(values, source, remainder, random)
            if values is self.master:
                self.drop()

    def drop(self) -> None:
        """A split master has no memory of its own any more."""
        if self.is_split:
            self.master.untyped_storage().resize_(0)

    def lower(self, here: Sequence[torch.Tensor]) -> list[Download]:
        """Sets the master, and its source, to what is `here`; returns what must be downloaded for that.

        Tensors on the device have the values at once.
        """
        copies = [Download(here[-1], host) for host in self.hosts]
        if copies and not self.is_split:
            if self._host_source is None:
                cast_(self.source, here[0])
            elif self._host_source is not self._host:
                copies.append(Download(cast(here[0], self._dtype), self._host_source))
        return copies

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
        here = self.here(self._transfers.upload(self.hosts).wait() if self.hosts else ())
        return whole(here if self._before is None else (self._before, *here[1:]))

    def put(self, values: torch.Tensor) -> None:
        """Overwrites the master, and with it the source, by values on the device, which are not written any more."""
        if self.at_hand:
            if values is not self.master:
                with torch.no_grad():
                    self.master.copy_(values)
            return
        here: tuple[torch.Tensor, ...] = (values.detach().to(self.master.dtype),)
        if self.is_split:
            (values,), here = here, self.here([torch.empty_like(h.tensor, device=values.device) for h in self.hosts])
            self.split(here, values)
        self._transfers.download(self.lower(here))

    def move(self, on_host: bool) -> None:
        """Moves a movable master into the other memory. To be called while nothing is gathered."""
        assert self.movable
        if on_host == bool(self.hosts):
            return
        if self._remainder is not None:
            self._move_remainder(self._remainder)
            return
        values = self.values()
        if on_host:
            self._host = self._transfers.zeros(self._numel, values.dtype)
            self.master = self._host.tensor
            if self.source is values:
                self.source = self._transport.empty(self._numel, self._dtype)
            self.put(values)
        else:
            self._host = None
            self.master = self.source = values

    def _move_remainder(self, remainder: torch.Tensor) -> None:
        if self._host is not None:
            (self._remainder,), self._host = self._transfers.upload([self._host]).wait(), None
        else:
            self._host = self._transfers.zeros(self._numel, remainder.dtype)
            self._remainder = self._host.tensor
            self._transfers.download([Download(remainder, self._host)])
