"""The optimizer's states in host memory: around each update they come to the device, and go back.

    lift     the uploads of a bucket's master and moments begin, one bucket ahead of the update that needs them
    land     the update finds them on the device: fragments and `optimizer.state` refer to the copies
    lower    the downloads begin; fragments and `optimizer.state` refer to host memory again

So the states of three buckets at most are on the device: those coming, those being updated, those going. Whatever an
optimizer keeps of a fragment's shape is a moment here; other state, such as a step counter, stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from zeroweave._torch.storages import storage_key
from zeroweave.optim.fragments import Fragments
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.transfers import Download, HostTensor, Transfers, Upload

State = MutableMapping[Any, dict[str, Any]]
_Kind = tuple[str, torch.dtype]


class FragmentMoment(NamedTuple):
    """One moment of one fragment: `held[key]`, with its place at `start` of all of that kind of the bucket."""

    slot: int
    start: int
    held: dict[str, Any]
    key: str

    @property
    def value(self) -> torch.Tensor:
        value: torch.Tensor = self.held[self.key]
        return value

    @property
    def kind(self) -> _Kind:
        return self.key, self.value.dtype

    def view(self, all_of_the_kind: torch.Tensor) -> torch.Tensor:
        return all_of_the_kind[self.start : self.start + self.value.numel()]


def moments_of(fragments: Fragments, state: State) -> list[FragmentMoment]:
    """What an optimizer keeps of the fragments of a bucket, of their shapes."""
    return [
        FragmentMoment(slot, start, held, key)
        for slot, (parameter, start) in enumerate(zip(fragments.parameters, fragments.starts, strict=True))
        for held in (state.get(parameter),)
        if held and parameter.numel()
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


class HostedMoments:
    """The moments of a bucket in host memory: one tensor [numel / world] for each kind of them.

    At rest the optimizer's state holds views of those. What somebody else puts there is taken in by the next `lift`.
    """

    def __init__(self, transfers: Transfers, fragments: Fragments, optimizer: torch.optim.Optimizer) -> None:
        self._transfers, self._fragments, self._optimizer = transfers, fragments, optimizer
        self._hosts: dict[_Kind, HostTensor] = {}
        self._views: dict[tuple[int, _Kind], torch.Tensor] = {}
        self._coming: tuple[list[_Kind], Upload] | None = None
        self._device: dict[_Kind, torch.Tensor] = {}

    def _moments(self) -> list[FragmentMoment]:
        return moments_of(self._fragments, self._optimizer.state)

    def nbytes(self) -> int:
        return sum(moment.value.nbytes for moment in self._moments())

    def lift(self) -> None:
        """Starts the uploads."""
        self._transfers.download(self.lower())
        kinds = list(dict.fromkeys(moment.kind for moment in self._moments()))
        self._coming = kinds, self._transfers.upload([self._hosts[kind] for kind in kinds])

    def abort(self) -> None:
        """Lets go of what was lifted and is not needed."""
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def land(self) -> None:
        """The state refers to the uploaded copies."""
        assert self._coming is not None
        (kinds, upload), self._coming = self._coming, None
        self._device = dict(zip(kinds, upload.wait(), strict=True))
        for moment in self._moments():
            moment.held[moment.key] = moment.view(self._device[moment.kind])

    def lower(self) -> list[Download]:
        """The state refers to host memory; returns what is to be downloaded there."""
        copies = [Download(tensor, self._hosts[kind]) for kind, tensor in self._device.items()]
        for moment in self._moments():
            kind, value = moment.kind, moment.value
            view = self._views.get((moment.slot, kind))
            if view is value:
                continue
            if kind not in self._hosts:
                self._hosts[kind] = self._transfers.zeros(self._fragments.numel, value.dtype)
            host = self._hosts[kind]
            landed = self._device.get(kind)
            if landed is None or storage_key(value) != storage_key(landed):  # the optimizer has just made it
                copies.append(Download(value.detach(), host, moment.start))
            if view is None:
                view = self._views[moment.slot, kind] = moment.view(host.tensor)
            moment.held[moment.key] = view
        self._device = {}
        return copies


class StateOffload:
    """Where the states of all buckets live, and their way to the device.

    `hosted`: the buckets whose moments live in host memory; masters do where their bucket's home says so.
    """

    def __init__(
        self,
        transfers: Transfers,
        buckets: Mapping[int, Bucket],
        fragments: Mapping[int, Fragments],
        optimizer: torch.optim.Optimizer,
        hosted: Iterable[int],
    ) -> None:
        self._transfers, self._buckets, self._fragments, self._optimizer = transfers, buckets, fragments, optimizer
        self._moments = {bucket: HostedMoments(transfers, fragments[bucket], optimizer) for bucket in hosted}
        self._lifted: dict[int, Upload | None] = {}
        """bucket -> its master on the way, if that lives in host memory"""
        self._after: dict[int, int] = {}
        """bucket -> the one that is updated next"""
        for moments in self._moments.values():
            transfers.download(moments.lower())

    # ------------------------------------------------------------------ the course of an optimizer step
    def expect(self, order: Sequence[int]) -> None:
        """Buckets will be updated in this order: the first one is lifted now, each further one ahead of its turn."""
        for bucket in list(self._lifted):
            self.abort(bucket)  # of a step that ended with an exception
        self._after = dict(pairwise(order))
        if order:
            self._lift(order[0])

    def comes(self, bucket: int) -> bool:
        """Does something that an update of the bucket needs live in host memory?"""
        return bucket in self._moments or (bucket in self._buckets and self._buckets[bucket].home.on_host)

    def _lifts(self, bucket: int, whole: bool) -> bool:
        """Is the master to be lifted?"""
        home = self._buckets[bucket].home if bucket in self._buckets else None
        return home is not None and (home.on_host or (whole and not home.at_hand))

    def _lift(self, bucket: int) -> None:
        if bucket in self._lifted or not self.comes(bucket):
            return
        home = self._buckets[bucket].home
        self._transfers.retire(1)
        self._lifted[bucket] = home.lift() if home.on_host else None
        if bucket in self._moments:
            self._moments[bucket].lift()

    def abort(self, bucket: int) -> None:
        """The bucket is not updated."""
        if (upload := self._lifted.pop(bucket, None)) is not None:
            upload.wait()
        if bucket in self._moments:
            self._moments[bucket].abort()

    @contextmanager
    def on_device(self, buckets: Sequence[int], whole: bool = True) -> Iterator[Mapping[int, torch.Tensor]]:
        """Inside, the fragments and states of these buckets are on the device. The next one in order comes, too.

        Not `whole`: masters that are split stay so. The value has those that were lifted, by bucket.
        """
        for bucket in buckets:
            self._lift(bucket)
        if buckets and buckets[-1] in self._after:
            self._lift(self._after[buckets[-1]])
        landing = [bucket for bucket in buckets if bucket in self._moments or self._lifts(bucket, whole)]
        masters = {bucket: self._land(bucket, whole) for bucket in landing}
        try:
            yield {bucket: master for bucket, master in masters.items() if master is not None}
        finally:
            for bucket, master in masters.items():
                self._lower(bucket, master)

    def _land(self, bucket: int, whole: bool) -> torch.Tensor | None:
        upload, home, master = self._lifted.pop(bucket, None), self._buckets[bucket].home, None
        if self._lifts(bucket, whole):
            (master,) = (upload or home.lift()).wait()
            self._fragments[bucket].point(master)
        if bucket in self._moments:
            self._moments[bucket].land()
        return master

    def _lower(self, bucket: int, master: torch.Tensor | None) -> None:
        copies = []
        if master is not None:
            self._fragments[bucket].point_home()
            copies = self._buckets[bucket].home.lower(master)
        if bucket in self._moments:
            copies += self._moments[bucket].lower()
        self._transfers.download(copies)

    # ------------------------------------------------------------------ where they live
    def on_host(self, moments: bool = True) -> tuple[int, ...]:
        """The buckets whose moments live in host memory; or not there."""
        return tuple(bucket for bucket in sorted(self._buckets) if (bucket in self._moments) == moments)

    def nbytes(self, bucket: int) -> int:
        """Bytes that the device has more to hold if the states of a bucket live there."""
        home = self._buckets[bucket].home
        moments = sum(moment.value.nbytes for moment in moments_of(self._fragments[bucket], self._optimizer.state))
        return moments + (home.saves if home.movable else 0)

    def host_nbytes(self) -> int:
        """Bytes of the moments in host memory."""
        return sum(moments.nbytes() for moments in self._moments.values())

    def move(self, bucket: int, on_host: bool) -> None:
        """Moves the moments of a bucket, and its master where it can, into the other memory; between two steps."""
        if on_host == (bucket in self._moments):
            return
        if on_host:
            moments = self._moments[bucket] = HostedMoments(self._transfers, self._fragments[bucket], self._optimizer)
            self._transfers.download(moments.lower())
        else:
            moments = self._moments.pop(bucket)
            moments.lift()
            moments.land()
        view = self._buckets[bucket]
        if view.home.movable:
            view.home.move(on_host)
            self._fragments[bucket].point_home()

    def take_in(self, bucket: int) -> None:
        """What somebody has put into the optimizer's state of a bucket goes where that bucket's moments live."""
        if bucket in self._moments:
            self._transfers.download(self._moments[bucket].lower())

    def finish(self) -> None:
        """The host may read and write states from here on; before, copies may be under way."""
        self._transfers.finish()
