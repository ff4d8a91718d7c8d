"""The control group: how ranks agree, on the host, once per optimizer step.

It is a gloo group of its own, beside the process group that moves parameters: it never waits for a device and
never touches NCCL. Everything it does is one operation, an all-gather of short byte strings
(`all_gather_bytes`), in frames of one fixed size, so that ranks that are in different places find that out
instead of reading each other's data wrongly.

A rank that waits for the others for longer than a moment writes on the board where it is. When a rank does not
come, the others read there who is missing, and raise that. Where it was last they know: all were in the last
operation that came to its end.
"""

from __future__ import annotations

import hmac
import pickle
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from zeroweave.errors import AgreementError, RankFailure, ZeroweaveError
from zeroweave.ranks.answers import answered, rendezvous
from zeroweave.ranks.board import Board
from zeroweave.ranks.differ import advice, same
from zeroweave.ranks.running import RunningClock
from zeroweave.ranks.start import backstop
from zeroweave.ranks.watcher import LOOK_SECONDS

_FRAME = 4096
"""Bytes of a frame. What does not fit behind its header goes into a second all-gather."""
_HEADER = struct.Struct("<Q248s")
"""Bytes of the payload, and the label of the operation."""
_INLINE = _FRAME - _HEADER.size
_FIELDS = struct.Struct("<qQQQQQ?")
"""Step, count, hash, candidate, record, options and flag of an agreement; the bits follow."""
_SETTLE_SECONDS = 0.3
"""How long the news of whose operation failed takes to reach every rank."""
_MOMENT = timedelta(seconds=0.1)
"""How long a rank waits before it tells where. Most operations take less, and to tell takes longer than they do."""


@dataclass(frozen=True)
class Agreement:
    """What one rank brings to the agreement of a step.

    `count` and `hash` are the ledger's; `flags` are bits or bytes, equally many on all ranks, of which the decision has
    each that any rank has; `candidate` is the hash of the schedule that this rank would adopt, 0 for none, and `record`
    that of the computation that it was made for; `options` is the hash of those that the rank would update by. 64
    bits each. `nonfinite`: a gradient of this rank is.
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


class Control:
    """Agreement between the ranks of one engine. All methods but `close` are collective, from one thread.

    A rank that does not come within `deadline_seconds` makes the others raise `AgreementError`; a connection
    that breaks while all are there is a `RankFailure`. After either the group cannot be used again (`broken`
    says why). In a world of 1 there is no group and no board, and every method returns at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world: int,
        deadline_seconds: float = 600.0,
        board: Board | None = None,
    ) -> None:
        if world > 1 and (group is None or board is None):
            raise ValueError("a control group of more than one rank needs a gloo group and a board")
        self.rank, self.world, self.deadline_seconds = rank, world, deadline_seconds
        self.board = board
        self.broken: str | None = None
        self.late = False
        """is it broken because a rank did not come before the deadline?"""
        self.waiting: float | None = None
        """since when this rank waits in an operation, if it does; an alarm's thread reads it"""
        self._ended = time.monotonic()  # the last operation
        self.operations = 0
        """how many this rank has begun; the alarm's thread reads it"""
        self._group = group
        # A frame to each rank and one from each, and tensors over them that share the buffers' memory.
        self._sent, self._received = bytearray(world * _FRAME), bytearray(world * _FRAME)
        self._input = torch.frombuffer(self._sent, dtype=torch.uint8)
        self._output = torch.frombuffer(self._received, dtype=torch.uint8)
        self._starts = range(0, world * _FRAME, _FRAME)
        # Eight bytes at a time are faster to compare.
        self._headers = [memoryview(self._received)[start : start + _HEADER.size].cast("Q") for start in self._starts]

    @classmethod
    def over(cls, process_group: dist.ProcessGroup | None = None, deadline_seconds: float = 600.0) -> Control:
        """The control group of `process_group`'s ranks, in its order; a world of 1 without torch.distributed.

        Collective over `process_group` (None: the default one), of whatever backend; with NCCL the current
        device must be set. The new group is registered nowhere: ranks outside need not take part, and
        destroying the default group leaves it alone. `close` ends it.
        """
        if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
            return cls(None, 0, 1, deadline_seconds)
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        open_board = Board.meet(process_group, deadline_seconds)
        with answered(rank, deadline_seconds, grace=LOOK_SECONDS):  # a connection has that deadline itself
            board = open_board()
        with rendezvous(board, "gloo", deadline_seconds) as store:
            # Gloo counts what a stopped process misses, too: the deadline is counted in `_wait`.
            group = dist.ProcessGroupGloo(store, rank, world, backstop(deadline_seconds))
        # a backend without its process group, which has the same methods
        control = cls(cast(dist.ProcessGroup, group), rank, world, deadline_seconds, board)
        control.barrier("the start of the engine")
        return control

    def agree(self, mine: Agreement, place: str = "agreement") -> Decision:
        """Compares this rank's `Agreement` with the others'; the same decision on all ranks.

        `place` says what is agreed on, in the words of the error that ranks at different places get.

        Raises `AgreementError` on all ranks if they issued different collectives or are at different steps.
        Costs one all-gather and no device synchronisation.
        """
        fields = (mine.step, mine.count, mine.hash, mine.candidate, mine.record, mine.options, mine.nonfinite)
        packed = _FIELDS.pack(*fields) + mine.flags
        return decide([_unpack(data) for data in self.all_gather_bytes(packed, f"{place} of step {mine.step}")])

    def barrier(self, label: str = "barrier") -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            self._meet(b"", label)

    def all_gather_object(self, item: Any, label: str = "all_gather_object") -> list[Any]:
        """Every rank's picklable `item`, in rank order."""
        data = pickle.dumps(item)
        return [self._loaded(theirs) for theirs in self.all_gather_bytes(self._mark(data) + data, label)]

    def broadcast_object(self, item: Any, source: int = 0, label: str = "broadcast_object") -> Any:
        """The picklable, small `item` of rank `source`; the others' are ignored. An all-gather, too."""
        data = pickle.dumps(item) if self.rank == source else b""
        return self._loaded(self.all_gather_bytes(self._mark(data) + data, label)[source])

    def _mark(self, data: bytes) -> bytes:
        return b"" if self.board is None else self.board.mark(data)

    def _loaded(self, data: bytes) -> Any:
        """What a rank has pickled. Nothing is read that no rank has marked."""
        size = len(self._mark(b""))
        if not hmac.compare_digest(data[:size], self._mark(data[size:])):
            raise RankFailure("a message between the ranks has no mark of this job: something else has written it")
        return pickle.loads(data[size:])

    def all_gather_bytes(self, data: bytes, label: str = "all_gather_bytes") -> list[bytes]:
        """Every rank's `data`, of any length, in rank order.

        `label` says where this rank is (the first 248 bytes count); ranks with different labels raise
        `AgreementError`, all of them.
        """
        if self.world == 1:
            return [data]
        sizes = self._meet(data, label)
        if max(sizes) > _INLINE:
            return self._gather_long(data, sizes, label)
        begins = [start + _HEADER.size for start in self._starts]
        return [bytes(self._received[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]

    def close(self) -> None:
        """Ends the group, and on rank 0 the board. At any time on each rank; after `Alarm.close`."""
        if self._group is not None and not self.late:
            self._group.shutdown()
        if self.board is not None:
            self.board.close()
        self._group, self.board = None, None
        self.broken = self.broken or "it was closed"

    def _meet(self, data: bytes, label: str) -> list[int]:
        """Exchanges a frame with the ranks, which are all at `label`; the length of each rank's data."""
        if self.broken is not None:
            raise RankFailure(f"the control group cannot be used again: {self.broken}")
        self.operations += 1
        frame = _HEADER.pack(len(data), label.encode()) + data[:_INLINE]
        for start in self._starts:
            self._sent[start : start + len(frame)] = frame
        # Straight from each rank to each, which is less work than gloo's all-gather.
        self._wait(lambda group: group.alltoall_base(self._output, self._input, [], []), label)
        if self._headers.count(self._headers[0]) == self.world:
            return [len(data)] * self.world
        _same_place([_label(header) for header in self._headers])
        return [_HEADER.unpack(header)[0] for header in self._headers]

    def _gather_long(self, data: bytes, sizes: list[int], label: str) -> list[bytes]:
        longest = max(sizes)
        received = bytearray(self.world * longest)
        outputs = list(torch.frombuffer(received, dtype=torch.uint8).view(self.world, longest).unbind())
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        self._wait(lambda group: group.allgather([outputs], [mine]), label)
        return [bytes(received[rank * longest :][:size]) for rank, size in enumerate(sizes)]

    def _wait(self, issue: Callable[[dist.ProcessGroup], dist.Work], label: str) -> None:
        """Issues an operation of the group and waits for it; what went wrong is raised, and told to the others."""
        assert self._group is not None
        self.waiting = time.monotonic()
        clock = RunningClock()
        begin = clock.look()
        try:
            work, moment = issue(self._group), _MOMENT
            while True:
                try:
                    work.wait(moment)
                    break
                except RuntimeError:  # it takes longer, or has failed
                    if work.is_completed():  # maybe since the wait gave up
                        work.wait()  # raises what it has failed with
                        break
                    if clock.look() - begin > self.deadline_seconds:
                        # Its end would wait for the operation, which may never end. A daemon's frame lasts.
                        kept = (self._group, work, issue, self._input, self._output)
                        threading.Thread(target=_keep, args=(kept,), name="zeroweave late", daemon=True).start()
                        raise
                    if moment is _MOMENT:
                        self._arrive(label)
                        moment = timedelta(seconds=LOOK_SECONDS)
            if self.waiting - self._ended > self.deadline_seconds and self._given_up():
                raise RuntimeError("this rank came after the deadline")
        except RuntimeError as error:
            lost = self._explain(label, clock.look() - begin, error)
            self.broken = str(lost)
            raise lost from error
        finally:
            self.waiting, self._ended = None, time.monotonic()

    def _given_up(self) -> bool:
        """Has another rank waited in vain for this one, and told so?"""
        assert self.board is not None
        with suppress(ConnectionError):
            places = map(_Place.parse, self.board.read("arrived"))
            return any(place.failure and place.operation >= self.operations for place in places)
        return False

    def _arrive(self, label: str, failure: str = "") -> None:
        assert self.board is not None
        try:
            self.board.post("arrived", f"{self.operations}\t{label}\t{failure}")
        except ConnectionError:
            pass  # rank 0 has gone; whoever reads the board will say so

    def _explain(self, label: str, waited: float, error: RuntimeError) -> ZeroweaveError:
        """Why an operation failed, by what the board says about where the others are."""
        assert self.board is not None
        self._arrive(label)
        time.sleep(_SETTLE_SECONDS)
        try:
            with answered(self.rank, self.deadline_seconds, since=self.waiting):
                places = [_Place.parse(line) for line in self.board.read("arrived")]
        except ConnectionError:
            return RankFailure(f"rank 0 has gone; rank {self.rank} waited for it at '{label}': {error}")
        for rank, place in enumerate(places):
            if place.failure and place.operation >= self.operations:
                return AgreementError(f"rank {rank} gave up at '{place.label}': {place.failure}")
        missing = [rank for rank, place in enumerate(places) if place.operation < self.operations]
        if not missing:
            return RankFailure(f"the ranks lost each other at '{label}': {error}")
        # Its frame is that of the operation before.
        last = {rank: _label(self._headers[rank]) or "nowhere yet" for rank in missing}
        who = ", ".join(f"rank {rank} (last seen at '{label}')" for rank, label in last.items())
        if waited >= 0.95 * self.deadline_seconds:
            reason, self.late = f"{who} did not arrive within the deadline of {self.deadline_seconds:g} s", True
        else:
            reason = f"{who} did not arrive, and the connection was lost after {waited:.1f} s: {error}"
        self._arrive(label, reason.replace("\n", " "))
        return AgreementError(f"[ZW502] rank {self.rank} gave up at '{label}': {reason}")


def _keep(_: object) -> None:
    threading.Event().wait()


@dataclass(frozen=True)
class _Place:
    """A rank's line under "arrived": the operation it waited in last, from 1, and if that failed, why."""

    operation: int
    label: str
    failure: str

    @classmethod
    def parse(cls, line: str) -> _Place:
        if not line:
            return cls(0, "", "")
        operation, label, failure = line.split("\t", 2)
        return cls(int(operation), label, failure)


def decide(all_ranks: Sequence[Agreement]) -> Decision:
    """The decision that follows from all agreements, in rank order; `AgreementError` if they differ."""
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
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


def _unpack(data: bytes) -> Agreement:
    step, count, digest, candidate, record, options, nonfinite = _FIELDS.unpack_from(data)
    return Agreement(step, count, digest, data[_FIELDS.size :], candidate, record, nonfinite, options)


def _label(header: memoryview) -> str:
    text: bytes = _HEADER.unpack(header)[1]
    return text.rstrip(b"\0").decode(errors="replace")


def _same_place(labels: list[str]) -> None:
    for rank, label in enumerate(labels):
        if not same(label, labels[0]):
            raise AgreementError(
                f"the ranks are in different places: rank 0 at '{labels[0]}', rank {rank} at '{label}'"
                + advice(labels[0], label)
            )
