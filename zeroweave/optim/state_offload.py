"""The optimizer's states in host memory: around each update they come to the device, and go back.

    lift     the uploads of a bucket's master and moments begin, one bucket ahead of the update that needs them
    land     the update finds them on the device: fragments and `optimizer.state` refer to the copies
    lower    the downloads begin; fragments and `optimizer.state` refer to host memory again

So the states of three buckets at most are on the device: those coming, those being updated, those going. More are
where the device has slack (`runtime.slack`): then they come from the last backward of the window on, and go until the
next forward needs their memory. What was written between its upload and its update is uploaded again.

What an optimizer keeps of a fragment's shape is a moment here; other state, such as a step counter, stays where it is.

Moments and masters of few bits come and go in the same way, as they are: codes, scales and remainders. Kernels update
those. For an optimizer that steps itself float32 copies are made of them on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from zeroweave._torch.storages import storage_key
from zeroweave.optim.compact import CompactMoments, refused_in
from zeroweave.optim.fragments import FragmentMoment, Fragments, Kind, moments_of
from zeroweave.optim.quantize8 import Coded, decode
from zeroweave.optim.states import is_cut, tensors_in
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.transfers import Download, HostTensor, Transfers, Upload


class HostedMoments:
    """The moments of a bucket in host memory: one tensor [numel / world] for each kind of them.

    At rest the optimizer's state holds views of those. The next `lift` takes what other code has put there.
    """

    def __init__(self, transfers: Transfers, fragments: Fragments, optimizer: torch.optim.Optimizer) -> None:
        self._transfers, self._fragments, self._optimizer = transfers, fragments, optimizer
        self._hosts: dict[Kind, HostTensor] = {}
        self._views: dict[tuple[int, Kind], torch.Tensor] = {}
        self._coming: list[Kind] = []
        self._device: dict[Kind, torch.Tensor] = {}

    def _moments(self) -> list[FragmentMoment]:
        return moments_of(self._fragments, self._optimizer.state)

    @property
    def nbytes(self) -> int:
        return sum(moment.value.nbytes for moment in self._moments())

    @property
    def hosts(self) -> list[HostTensor]:
        """What is lifted: elements of padding have moments, too."""
        return [*self._hosts.values()]

    def lift(self) -> list[HostTensor]:
        """What is to be uploaded."""
        self._transfers.download(self.lower())
        self._coming = list(dict.fromkeys(moment.kind for moment in self._moments()))
        return [self._hosts[kind] for kind in self._coming]

    @property
    def replaced(self) -> bool:
        """True if the state is in other tensors than were lifted."""
        return any(self._views.get((m.slot, m.kind)) is not m.value for m in self._moments())

    def land(self, come: Sequence[torch.Tensor]) -> None:
        """The state refers to the uploaded copies."""
        self._device = dict(zip(self._coming, come, strict=True))
        for moment in self._moments():
            moment.held[moment.key] = moment.view(self._device[moment.kind])

    def lower(self) -> list[Download]:
        """The state refers to host memory; returns the downloads to begin."""
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


class HostedCodes:
    """The same of moments of few bits: two tensors for each key, to which `CompactMoments.coded` refers at rest."""

    def __init__(self, transfers: Transfers, moments: CompactMoments) -> None:
        self._transfers, self._moments = transfers, moments
        self._hosts: dict[str, tuple[HostTensor, ...]] = {}
        self._coming: list[HostTensor] = []

    @property
    def nbytes(self) -> int:
        return self._moments.nbytes

    @property
    def hosts(self) -> list[HostTensor]:
        return [host for key in self._moments.coded for host in self._hosts.get(key, ())]

    def lift(self) -> list[HostTensor]:
        self._transfers.download(self.lower())
        self._coming = self.hosts
        return self._coming

    @property
    def replaced(self) -> bool:
        return [id(host.tensor) for host in self._coming] != [id(tensor) for tensor in self._moments.tensors]

    def land(self, come: Sequence[torch.Tensor]) -> None:
        copies = iter(come)
        for key in self._moments.coded:
            self._moments.coded[key] = Coded(next(copies), next(copies))

    def lower(self) -> list[Download]:
        copies = []
        for key, coded in self._moments.coded.items():
            if key not in self._hosts:
                self._hosts[key] = tuple(self._transfers.zeros(each.numel(), each.dtype) for each in coded)
            hosts = self._hosts[key]
            copies += [Download(each, host) for each, host in zip(coded, hosts, strict=True) if each is not host.tensor]
            self._moments.coded[key] = Coded(*(host.tensor for host in hosts))
        return copies


class _Landed(NamedTuple):
    """What of a bucket's states is on the device for an update, besides moments of host memory."""

    here: tuple[torch.Tensor, ...]
    """see `Shard.here`"""
    master: torch.Tensor | None
    """as one device tensor, if it is split or in host memory at rest"""
    compact: CompactMoments | None
    random: torch.Tensor | None
    """room for the noise by which both are rounded"""


class StateOffload:
    """Where the states of all buckets live, and their way to the device.

    `hosted`: the buckets whose moments live in host memory; masters do where their bucket's home says so. `compact`:
    those whose moments have few bits.
    """

    def __init__(
        self,
        transfers: Transfers,
        buckets: Mapping[int, Bucket],
        fragments: Mapping[int, Fragments],
        optimizer: torch.optim.Optimizer,
        hosted: Iterable[int],
        compact: Iterable[int] = (),
    ) -> None:
        self._transfers, self._buckets, self._fragments, self._optimizer = transfers, buckets, fragments, optimizer
        self.compact = {b: CompactMoments(buckets[b], fragments[b], optimizer) for b in compact}
        self._moments = {bucket: self._hosted(bucket) for bucket in hosted}
        self._large = [p for each in fragments.values() for p in each.parameters if p.numel() > 1]
        self._lifted: dict[int, Upload] = {}
        """bucket -> what is on the way: of its master, and then its moments"""
        self._bytes: dict[int, int] = {}
        """bucket -> those of the device that what was lifted of it takes"""
        self._order: Sequence[int] = ()
        """in which buckets are updated, or were in the last step"""
        self._ahead = False
        """true from a window's last backward to its update"""
        self._early: list[tuple[int, torch.Event]] = []
        """bytes of each bucket that was lifted in the last backward, and when they had come"""
        self._due: torch.Event | None = None
        """when the update after it could begin"""
        self._late: frozenset[int] = frozenset()
        """buckets whose downloads begin with the next forward"""
        for moments in self._moments.values():
            transfers.download(moments.lower())

    def _hosted(self, bucket: int) -> HostedMoments | HostedCodes:
        if bucket in self.compact:
            return HostedCodes(self._transfers, self.compact[bucket])
        return HostedMoments(self._transfers, self._fragments[bucket], self._optimizer)

    # ------------------------------------------------------------------ the course of an optimizer step
    def run_ahead(self) -> None:
        """A backward begins that an update follows: as its calls begin, buckets are lifted while there is slack."""
        self.recall()
        self._ahead = True
        self._transfers.run_ahead(self._lift_ahead)

    def _lift_ahead(self) -> bool:
        """False if what is free lies in pieces: the update finds more."""
        try:
            self._lift_more(self._transfers.slack.lasting_room)
        except torch.OutOfMemoryError:
            return False
        return True

    def stand(self) -> None:
        """That backward is over: the computation asks for no more memory."""
        self._transfers.stand(whole=True)

    def recall(self) -> None:
        """No update follows what was lifted, or one that ended with an exception: it is dropped."""
        self._transfers.stand(whole=False)
        self._ahead = False
        for bucket in list(self._lifted):
            self.abort(bucket)

    def expect(self, order: Sequence[int]) -> None:
        """Buckets will be updated in this order: the first one is lifted now, each further one ahead of its turn."""
        if not self._ahead:
            self.recall()
        self.stand()
        for bucket in set(self._lifted).difference(order):
            self.abort(bucket)
        self._ahead, self._order = False, tuple(order)
        self._hold_back()
        self._lift_more(self._transfers.slack.room, least=1)

    def _hold_back(self) -> None:
        """What an update sends in addition to what it receives goes in the next forward: the last buckets of its order.

        Both directions take equally long. So as many bytes remain as had come before the update, in the step before.
        """
        if (due := self._due) is not None and due.query() and all(come.query() for _, come in self._early):
            room = sum(nbytes for nbytes, come in self._early if come.elapsed_time(due) >= 0)
            late = set[int]()
            for bucket in reversed(self._order):
                room -= self._nbytes(bucket)
                if room < 0:
                    break
                late.add(bucket)
            self._late = frozenset(late)
        self._early = [(self._bytes[b], upload.event) for b, upload in self._lifted.items() if upload.event is not None]
        self._due = self._transfers.now()

    def _lift_more(self, room: int, after: int | None = None, least: int = 0) -> None:
        """Lifts the buckets whose turns follow that of `after`, or all: `least` in any case, more while there is room.

        The uploads keep the order of the turns. `room`: bytes.
        """
        begin = 0 if after is None else self._order.index(after) + 1
        for turn, bucket in enumerate(self._order[begin:]):
            if bucket in self._lifted or not self.comes(bucket):
                continue
            nbytes = self._nbytes(bucket)
            if turn >= least and room < nbytes:
                return
            self._lift(bucket)
            room -= nbytes

    def _nbytes(self, bucket: int) -> int:
        """Bytes of the device that a bucket takes while it is lifted."""
        moments = self._moments[bucket].hosts if bucket in self._moments else ()
        return sum(host.tensor.nbytes for host in (*self._buckets[bucket].home.hosts, *moments))

    def comes(self, bucket: int) -> bool:
        """True if something that an update of the bucket needs is in host memory."""
        return bucket in self._moments or (bucket in self._buckets and bool(self._buckets[bucket].home.hosts))

    def _lift(self, bucket: int) -> None:
        if bucket in self._lifted or not self.comes(bucket):
            return
        nbytes, hosts = self._nbytes(bucket), [*self._buckets[bucket].home.hosts]
        self._transfers.make_room(nbytes, most=1)
        self._count(bucket, nbytes)
        try:
            if bucket in self._moments:
                hosts += self._moments[bucket].lift()
            self._lifted[bucket] = self._transfers.upload(hosts)
        except BaseException:
            self.abort(bucket)
            raise

    def _count(self, bucket: int, nbytes: int) -> None:
        """What is lifted of a bucket takes so many bytes of the device from now on."""
        self._transfers.slack.add(nbytes - self._bytes.pop(bucket, 0))
        if nbytes:
            self._bytes[bucket] = nbytes

    def abort(self, bucket: int) -> None:
        """The bucket is not updated."""
        self._count(bucket, 0)
        if (upload := self._lifted.pop(bucket, None)) is not None:
            upload.wait()

    @contextmanager
    def on_device(self, buckets: Sequence[int], whole: bool = True) -> Iterator[Mapping[int, tuple[torch.Tensor, ...]]]:
        """Inside, the fragments and states of these buckets are on the device. The next one in order comes, too.

        Not `whole`: masters that are split, and moments of few bits, stay so. The value has what holds the masters
        there, by bucket.
        """
        for bucket in buckets:
            if bucket in self._lifted and self._outdated(bucket):
                self.abort(bucket)
            self._lift(bucket)
        if buckets and buckets[-1] in self._order:
            self._lift_more(self._transfers.slack.room, buckets[-1], least=1)
        here: dict[int, tuple[torch.Tensor, ...]] = {}
        with ExitStack() as ends:
            for bucket in buckets:
                landed = self._land(bucket, whole)
                ends.callback(self._lower, bucket, landed)
                here[bucket] = landed.here
            yield here

    def _outdated(self, bucket: int) -> bool:
        return self._lifted[bucket].outdated or (bucket in self._moments and self._moments[bucket].replaced)

    def _land(self, bucket: int, whole: bool) -> _Landed:
        """What raises leaves the bucket as it was. So all memory that an update is known to need is made here.

        After the update an error would lose it.
        """
        home, moments, master, random = self._buckets[bucket].home, self._moments.get(bucket), None, None
        compact = self.compact.get(bucket) if whole else None
        joins = whole if home.is_split else bool(home.hosts)
        come = self._lifted[bucket].wait() if bucket in self._lifted else ()
        here = home.here(come[: len(home.hosts)])
        try:
            if moments is not None:
                moments.land(come[len(home.hosts) :])
            if compact is not None:
                random = compact.room_for_noise()
                compact.land()
            if joins:
                master = home.join(here)
        except BaseException:
            if compact is not None:
                compact.drop()
            if moments is not None:
                self._transfers.download(moments.lower())
            self.abort(bucket)
            raise
        self._lifted.pop(bucket, None)
        if master is not None:
            self._fragments[bucket].point(master)
        return _Landed(here, master, compact, random)

    def _lower(self, bucket: int, landed: _Landed) -> None:
        """What raises leaves no copies."""
        here, master, compact, random = landed
        home = self._buckets[bucket].home
        if master is not None:
            self._fragments[bucket].point_home()
        try:
            if compact is not None and random is not None:
                compact.noise_(random)
            if master is not None:
                home.split(here, master, random)
            if compact is not None:
                compact.lower(random)
        except BaseException:
            if compact is not None:
                compact.lose()
            if master is not None:
                home.drop()
            raise
        finally:
            copies = home.lower(here)
            if bucket in self._moments:
                copies += self._moments[bucket].lower()
            self._count(bucket, 0)
            begin = self._transfers.download_later if bucket in self._late else self._transfers.download
            begin(copies)

    # ------------------------------------------------------------------ where they live
    def on_host(self, moments: bool = True) -> tuple[int, ...]:
        """The buckets whose moments live in host memory; or not there."""
        return tuple(bucket for bucket in sorted(self._buckets) if (bucket in self._moments) == moments)

    def nbytes(self, bucket: int) -> int:
        """Bytes that the device has more to hold if the states of a bucket live there."""
        home = self._buckets[bucket].home
        held = moments_of(self._fragments[bucket], self._optimizer.state)
        moments = sum(moment.value.nbytes for moment in held)
        moments += self.compact[bucket].nbytes if bucket in self.compact else 0
        return moments + (home.saves if home.movable else 0)

    def host_nbytes(self) -> int:
        """Bytes of the moments in host memory."""
        return sum(moments.nbytes for moments in self._moments.values())

    def move(self, bucket: int, on_host: bool) -> None:
        """Moves the moments of a bucket, and its master where it can, into the other memory; between two steps."""
        if on_host == (bucket in self._moments):
            return
        if on_host:
            moments = self._moments[bucket] = self._hosted(bucket)
            self._transfers.download(moments.lower())
        else:
            moments = self._moments.pop(bucket)
            moments.land(self._transfers.upload(moments.lift()).wait())
        view = self._buckets[bucket]
        if view.home.movable:
            view.home.move(on_host)
            self._fragments[bucket].point_home()

    # ------------------------------------------------------------------ what they are
    def refused_in(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        """Options of groups of the optimizer's kind that its states cannot have, in words."""
        return refused_in(groups) if self.compact else []

    def value_of(self, bucket: int, slot: int, key: str) -> Any:
        """One value of `state_of`, or None. No other is decoded."""
        coded = self.coded(bucket, slot).get(key)
        held = self._optimizer.state.get(self._fragments[bucket].parameters[slot], {})
        return held.get(key) if coded is None else decode(coded)

    def state_of(self, bucket: int, slot: int) -> Mapping[str, Any]:
        """What the optimizer holds of a fragment, in float32 where that has few bits, by then as copies."""
        held = self._optimizer.state.get(self._fragments[bucket].parameters[slot], {})
        coded = self.coded(bucket, slot)
        return {**held, **{key: decode(each) for key, each in coded.items()}} if coded else held

    def outline_of(self, bucket: int, slot: int) -> Mapping[str, Any]:
        """The same, but what has few bits is not decoded: tensors without memory have its shapes and dtypes."""
        held = self._optimizer.state.get(self._fragments[bucket].parameters[slot], {})
        return {**held, **(self.compact[bucket].outline(slot) if bucket in self.compact else {})}

    def uncuttable(self) -> str:
        """What of the states of fragments cannot be put together, in words; "" where there is nothing."""
        told: dict[Any, str] = {}
        for bucket, each in self._buckets.items():
            for slot, fragment in zip(each.layout.slots, self._fragments[bucket].parameters, strict=True):
                for key, value in self._optimizer.state.get(fragment, {}).items() if fragment.numel() > 1 else ():
                    shapes = set() if isinstance(value, torch.Tensor) else {t.shape for t in tensors_in(value)}
                    words = (
                        f"the optimizer keeps tensors of the elements of {slot.name!r} in a {type(value).__name__} "
                        f"under {key!r}, where ranks cannot put them together: each needs a key of its own"
                    )
                    if shapes and fragment.shape not in shapes:
                        told[key] = ""  # of others, too, they are no elements: lengths are equal by chance
                    elif shapes:
                        told.setdefault(key, words)
        return next(filter(None, told.values()), "")

    def cut_of(self, bucket: int, slot: int) -> frozenset[Any]:
        """The keys of `outline_of` under which there is something of each element, and not of the parameter."""
        fragment, held = self._fragments[bucket].parameters[slot], self.outline_of(bucket, slot)
        state = self._optimizer.state
        others = (lambda: ((p, state[p]) for p in self._large if p in state)) if fragment.numel() == 1 else tuple
        return frozenset(key for key, value in held.items() if is_cut(fragment, key, value, others()))

    def coded(self, bucket: int, slot: int) -> Mapping[str, Coded]:
        """What has few bits of that, by key."""
        return self.compact[bucket].parts(slot) if bucket in self.compact else {}

    @contextmanager
    def writing(self, bucket: int, replaced: Iterable[int] = ()) -> Iterator[None]:
        """Inside, the host may write into what the optimizer holds of a bucket, and put other tensors there.

        It goes where that bucket's moments live then. Of the slots `replaced` nothing is left but what is put there.
        """
        self.finish()
        if (compact := self.compact.get(bucket)) is not None:
            compact.forget(replaced)
            compact.land()
        try:
            yield
        finally:
            if compact is not None:
                compact.lower()
            if bucket in self._moments:
                self._transfers.download(self._moments[bucket].lower())

    def finish(self) -> None:
        """The host may read and write states from here on; before, copies may be under way."""
        self._transfers.finish()
