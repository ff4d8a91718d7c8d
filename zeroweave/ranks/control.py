"""The control group: how ranks agree, on the host, once per optimizer step.

It is a connection of each rank to the coordinator, apart from the process groups that move parameters: it never waits
for a device. An operation costs a rank one message and its answer, whatever the number of ranks. Ranks that are in
different places find that out instead of reading each other's data wrongly. When one does not come, the others learn
which.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from zeroweave._torch.distributed import default_store
from zeroweave.errors import AgreementError, RankFailure
from zeroweave.ranks.channel import LOOK_SECONDS, Channel
from zeroweave.ranks.coordinator import Answer, Coordinator
from zeroweave.ranks.process import RunningClock, network, own
from zeroweave.ranks.status import Brought

_GRACE_SECONDS: Final = 5.0
"""How long behind a deadline the coordinator may be with its answer."""
NO_ANSWER: Final = "rank 0, whose process coordinates the ranks, has not answered"


@dataclass(frozen=True)
class Agreement:
    """What one rank brings to the agreement of a step.

    `count` and `hash` are the ledger's; `flags` are bits or bytes, equally many on all ranks: the decision has their
    union; `candidate` is the hash of the schedule that this rank would adopt, 0 for none, and `record` that of the
    computation that it was made for; `options` is the hash of those that the rank would update by. 64 bits each.
    `nonfinite`: a gradient of this rank is.
    """

    step: int
    count: int
    hash: int
    flags: bytes
    candidate: int = 0
    record: int = 0
    nonfinite: bool = False
    options: int = 0


@dataclass(frozen=True)
class Decision:
    """What all ranks take away: the flags of any of them, and whether all would adopt one schedule.

    `differ`: they would not, although all compute the same: something other than the step made the difference.
    `options_differ`: they would update by different ones, or by numbers that differ in their last bits.
    `nonfinite`: some rank's gradients are. `record`: as in their agreements, 0 where those differ.
    """

    flags: bytes
    adopt: bool
    differ: bool = False
    nonfinite: bool = False
    record: int = 0
    options_differ: bool = False


class Diverged(AgreementError):
    """The ranks issued different collectives. `rank`: the first whose collectives are not those of rank 0."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[Diverged], tuple[str, int]]:
        return Diverged, (str(self), self.rank)


@dataclass(frozen=True)
class Address:
    """Where rank 0 has the coordinator.

    `name`: what all ranks call it, and no other one. `process`: rank 0's, see `process.own`. `token`: what the ranks
    have in common, and nobody else knows.
    """

    host: str
    port: int
    name: str
    process: str
    token: bytes


class Control:
    """Agreement between the ranks of one engine. All methods but `close` are collective, from one thread.

    A rank that does not come within `deadline_seconds` makes the others raise `AgreementError`; where rank 0 has gone
    it is a `RankFailure`. After either the group cannot be used again (`broken` says why). In a world of 1 there is no
    connection, and every method returns at once. On rank 0 `coordinator` is the one at the address.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        deadline_seconds: float = 600.0,
        address: Address | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        if world > 1 and address is None:
            raise ValueError("a control group of more than one rank needs a coordinator")
        self.rank, self.world, self.deadline_seconds = rank, world, deadline_seconds
        self.broken: str | None = None
        self.late = False
        """is it broken because a rank did not come before the deadline?"""
        self.waiting: float | None = None
        """since when this rank waits in an operation or a meeting, if it does; an alarm's thread reads it"""
        self.operations = 0
        """how many this rank has begun"""
        self.address, self.coordinator = address, coordinator
        self.channel = None if world == 1 else self.connect("control")

    @classmethod
    def over(cls, process_group: dist.ProcessGroup | None = None, deadline_seconds: float = 600.0) -> Control:
        """The control group of `process_group`'s ranks, in its order; a world of 1 without torch.distributed.

        Collective over `process_group` (None: the default one), of whatever backend; with NCCL the current
        device must be set. Ranks outside need not take part. `close` ends it.
        """
        if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
            return cls(0, 1, deadline_seconds)
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        # MASTER_ADDR belongs to the first rank of the job, which need not be in this group.
        host = (dist.get_rank() == 0 and os.environ.get("MASTER_ADDR")) or socket.gethostname()
        host = "127.0.0.1" if _share_network(process_group) else host
        coordinator, told = None, [Address("", 0, "", "", b"")]
        with ExitStack() as ends:
            if rank == 0:
                listener, token = listen(host), secrets.token_bytes(32)
                coordinator = coordinate(world, listener, token, deadline_seconds)
                ends.callback(coordinator.close)
                told = [Address(host, listener.getsockname()[1], uuid.uuid4().hex, own(), token)]
            dist.broadcast_object_list(told, group_src=0, group=process_group)
            (address,) = told
            control = cls(rank, world, deadline_seconds, address, coordinator)
            ends.callback(control.close)
            control.barrier("the start of the engine")
            ends.pop_all()
        return control

    def connect(self, kind: str) -> Channel:
        """A connection to the coordinator."""
        assert self.address is not None
        try:
            where = self.address.host, self.address.port
            return Channel(where, self.address.token, (kind, self.rank, own()), self.deadline_seconds)
        except ConnectionError as error:
            raise RankFailure(str(error)) from error

    def agree(self, mine: Agreement, place: str = "agreement") -> Decision:
        """Compares this rank's `Agreement` with the others'; the same decision on all ranks.

        `place` says what is agreed on, in the words of the error that ranks at different places get.

        Raises `AgreementError` on all ranks if they issued different collectives or are at different steps.
        """
        if self.world == 1:
            return decide({0: mine})
        data = pickle.dumps(tuple(vars(mine).values()))
        return Decision(*self._operate("agree", data, f"{place} of step {mine.step}", issued=mine.count))

    def barrier(self, label: str = "barrier", issued: int | None = None) -> None:
        """Returns when every rank has called it. `issued`: see `Brought`."""
        if self.world > 1:
            self._operate("gather", b"", label, issued=issued)

    def all_gather_object(self, item: Any, label: str = "all_gather_object") -> list[Any]:
        """Every rank's picklable `item`, in rank order."""
        return [pickle.loads(theirs) for theirs in self.all_gather_bytes(pickle.dumps(item), label)]

    def broadcast_object(self, item: Any, label: str = "broadcast_object") -> Any:
        """The picklable `item` of rank 0; the others' are ignored."""
        return pickle.loads(self.all_gather_bytes(b"" if self.rank else pickle.dumps(item), label)[0])

    def all_gather_bytes(
        self, data: bytes, label: str = "all_gather_bytes", deadline_seconds: float | None = None
    ) -> list[bytes]:
        """Every rank's `data`, of any length, in rank order. What ranks have alike travels once.

        `label` says where this rank is; ranks with different labels raise `AgreementError`, all of them.
        """
        if self.world == 1:
            return [data]
        kept, places = self._operate("gather", data, label, deadline_seconds)
        return [kept[place] for place in places] if places else kept * self.world

    @contextmanager
    def meeting(self, name: str) -> Iterator[Store]:
        """A store in which these ranks meet for a process group. An alarm ends a rank that waits there for too long."""
        assert self.address is not None
        self.waiting = time.monotonic()
        try:
            yield PrefixStore(f"zeroweave {self.address.name} {name}", default_store())
        finally:
            self.waiting = None

    def close(self) -> None:
        """Ends the group, and on rank 0 the coordinator. At any time on each rank; after `Alarm.close`."""
        if self.channel is not None:
            self.channel.close()
        if self.coordinator is not None:
            self.coordinator.close()
        self.channel, self.coordinator = None, None
        self.broken = self.broken or "it was closed"

    def _operate(
        self, kind: str, data: bytes, label: str, deadline_seconds: float | None = None, issued: int | None = None
    ) -> Any:
        """Brings this rank's data; what the coordinator makes of all ranks'."""
        if self.broken is not None or self.channel is None:
            raise RankFailure(f"the control group cannot be used again: {self.broken}")
        # First of all: after Ctrl-C, which comes between any two lines, an answer that was not read would be taken for
        # that of the next operation.
        self.broken = "an operation was interrupted"
        self.operations += 1
        deadline = deadline_seconds or self.deadline_seconds
        try:
            self.waiting = time.monotonic()
            answer = self._answer(Brought(label, kind, data, deadline, issued), deadline)
        except ConnectionError as error:
            self.broken = f"{error}; rank {self.rank} waited for it at '{label}'"
            raise RankFailure(self.broken) from error
        finally:
            self.waiting = None
        self.late = answer.late
        self.broken = str(answer.error) if answer.over else None
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _answer(self, brought: Brought, deadline: float) -> Answer:
        assert self.channel is not None
        clock = RunningClock()
        end = clock.look() + deadline + _GRACE_SECONDS
        self.channel.send(tuple(brought))
        while (message := self.channel.receive(LOOK_SECONDS)) is None:
            if clock.look() > end:
                raise ConnectionError(f"{NO_ANSWER} within the deadline of {deadline:g} s")
        return Answer(*message)


def coordinate(world: int, listener: socket.socket, token: bytes, deadline_seconds: float) -> Coordinator:
    """Starts the coordinator of so many ranks, which reach this process at `listener`."""
    return Coordinator(world, listener, token, deadline_seconds, agree=_agreed, gather=_gathered)


def _agreed(brought: Mapping[int, bytes]) -> tuple[Any, ...]:
    decision = decide({rank: Agreement(*pickle.loads(data)) for data, rank in _first_with(brought).items()})
    return tuple(vars(decision).values())


def _gathered(brought: Mapping[int, bytes]) -> tuple[list[bytes], list[int]]:
    """What ranks have brought, each once, and which of it each rank has; nothing where all have the same."""
    kept = list(_first_with(brought))
    places = {data: place for place, data in enumerate(kept)}
    return kept, [places[data] for data in brought.values()] if len(kept) > 1 else []


def _first_with(brought: Mapping[int, bytes]) -> dict[bytes, int]:
    """The different data, each with the first rank that has it."""
    found: dict[bytes, int] = {}
    for rank, data in brought.items():
        found.setdefault(data, rank)
    return found


def decide(ranks: Mapping[int, Agreement]) -> Decision:
    """The decision that follows from all agreements; `AgreementError` if they differ.

    Of ranks that agree in everything one is enough. Rank 0 must be there.
    """
    first, all_ranks = ranks[0], ranks.values()
    for rank, other in ranks.items():
        if other.step != first.step:
            raise AgreementError(f"rank 0 is at step {first.step}, rank {rank} at step {other.step}")
        if len(other.flags) != len(first.flags):
            raise AgreementError(
                f"rank 0 tells of {len(first.flags)} bytes of flags, "
                f"rank {rank} of {len(other.flags)}: their models differ"
            )
        if (other.count, other.hash) != (first.count, first.hash):
            raise Diverged(
                f"[ZW506] step {first.step}: the ranks issued different collectives, so no gradient can be trusted; "
                f"nothing has been written. Rank 0 issued {first.count} (hash {first.hash:016x}), "
                f"rank {rank} issued {other.count} (hash {other.hash:016x})"
                + ("" if other.count != first.count else ": equally many, but others or in another order"),
                rank,
            )
    bits = 0
    for each in all_ranks:
        bits |= int.from_bytes(each.flags, "little")
    candidates, records = {each.candidate for each in all_ranks}, {each.record for each in all_ranks}
    adopt = len(candidates) == 1 and 0 not in candidates
    differ = len(candidates) > 1 and len(records) == 1
    nonfinite = any(each.nonfinite for each in all_ranks)
    record = first.record if len(records) == 1 else 0
    options_differ = any(each.options != first.options for each in all_ranks)
    return Decision(bits.to_bytes(len(first.flags), "little"), adopt, differ, nonfinite, record, options_differ)


def listen(host: str) -> socket.socket:
    """Listens on a free port of the interface that has the address `host`.

    On all interfaces where none here has it, as behind a translated address, or where it is only this machine's name
    for itself.
    """
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=4096)
        if host == "127.0.0.1" or not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
            return listener
        listener.close()
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _share_network(process_group: dist.ProcessGroup | None) -> bool:
    """Have all ranks the same loopback? Collective."""
    mine = int.from_bytes(hashlib.sha256(network().encode()).digest()[:7])
    device = "cuda" if "nccl" in dist.get_backend_config(process_group) and torch.cuda.is_available() else "cpu"
    least = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=process_group)
    low, high = least.tolist()
    return bool(low == -high)
