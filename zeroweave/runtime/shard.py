"""A bucket's shard: the master, what is gathered of it, and where both live.

             master (`values`, `put`)      source (what is gathered)
on device    one tensor, rounded as it is gathered
master off   host memory                   device memory, in the dtype of the computation
both off     host memory                   host memory, the same tensor where the dtypes are the same
"""

from __future__ import annotations

import torch

from zeroweave.comm.transport import Gatherer, Transport
from zeroweave.layout import BucketLayout
from zeroweave.runtime.transfers import Download, HostTensor, Transfers, Upload, UploadingGatherer


class Shard:
    """This rank's part [numel / world] of a bucket, gathered in `dtype`.

    The master of trained parameters has at least float32: it is what the optimizer updates, and rounded to make the
    source. `master_off`: the master lives in host memory if it is wider than what is gathered; `source_off`: all does.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        transport: Transport,
        transfers: Transfers,
        master_off: bool = False,
        source_off: bool = False,
    ) -> None:
        self.wider = wider = layout.trainable and dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
        """is the master rounded to be gathered?"""
        self._dtype, self._transport, self._transfers = dtype, transport, transfers
        self._numel = layout.shard_numel
        self._host: HostTensor | None = None
        """the master's, where it lives in host memory"""
        self._host_source: HostTensor | None = None
        self.movable = wider and master_off and not source_off
        """can the master live in either memory?"""
        kind = torch.float32 if wider else dtype
        if source_off or self.movable:
            self._host = transfers.zeros(self._numel, kind)
            self.master = self._host.tensor
        else:
            self.master = transport.empty(self._numel, kind)
        self.source = self.master
        """in host memory or on the device"""
        self.gatherer: Gatherer = transport
        """through which the source is gathered"""
        if source_off:
            self._host_source = transfers.zeros(self._numel, dtype) if wider else self._host
            assert self._host_source is not None
            self.source = self._host_source.tensor
            self.gatherer = UploadingGatherer(transfers, transport, self._host_source)
        elif self.movable:
            self.source = transport.empty(self._numel, dtype)

    @property
    def on_host(self) -> bool:
        """Does the master live in host memory?"""
        return self._host is not None

    @property
    def source_on_host(self) -> bool:
        return self._host_source is not None

    @property
    def saves(self) -> int:
        """Bytes of the device that a movable master does not take while it lives in host memory."""
        return self._numel * (self.master.itemsize - self._dtype.itemsize)

    def lift(self) -> Upload:
        """Starts to copy the master, which lives in host memory, to the device: one tensor."""
        assert self._host is not None
        return self._transfers.upload([self._host])

    def values(self) -> torch.Tensor:
        """The master on the device: itself, or a copy."""
        return self.lift().wait()[0] if self.on_host else self.master

    @torch.no_grad()
    def put(self, values: torch.Tensor) -> None:
        """Overwrites the master, and with it the source, by values on the device, which nobody writes any more."""
        if self._host is not None:
            self._transfers.download(self.lower(values.detach().to(self.master.dtype)))
        elif values is not self.master:
            self.master.copy_(values)

    @torch.no_grad()
    def lower(self, values: torch.Tensor) -> list[Download]:
        """What is to be downloaded so that a master in host memory, and its source there, are `values`.

        A source on the device has them at once.
        """
        assert self._host is not None
        copies = [Download(values, self._host)]
        if self._host_source is None:
            self.source.copy_(values)
        elif self._host_source is not self._host:
            copies.append(Download(values.to(self._dtype), self._host_source))
        return copies

    def move(self, on_host: bool) -> None:
        """Moves a movable master into the other memory. To be called while nothing is gathered."""
        assert self.movable
        if on_host == self.on_host:
            return
        if on_host:
            values, self._host = self.master, self._transfers.zeros(self._numel, self.master.dtype)
            self.master, self.source = self._host.tensor, self._transport.empty(self._numel, self._dtype)
            self.put(values)
        else:
            self.master = self.source = self.values()
            self._host = None
