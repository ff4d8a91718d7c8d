"""The coordinator: a thread of rank 0's process to which every rank has two connections.

Over one a rank brings what the ranks agree on: one message to the coordinator and one back, whatever the number of
ranks. Over the other one its alarm tells where it is, each second, and when it fails; the coordinator answers, and says
when its process must end: `rules` has the reasons. No rank asks another one.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from zeroweave.errors import AgreementError, RankFailure, ZeroweaveError
from zeroweave.notices import warn
from zeroweave.ranks.channel import LOOK_SECONDS, WELCOME, Codec, Connection, Forged
from zeroweave.ranks.differ import Issued, advice, explain, same
from zeroweave.ranks.process import RunningClock, is_stopped
from zeroweave.ranks.rules import alike, late, waits_in_vain
from zeroweave.ranks.status import Brought, Failure, Member, Status, Trail, names, nodes, steady, tell

PARTING_SECONDS: Final = 5.0
"""How long rank 0 stays for ranks that do not yet know that it has left."""
_GREETING_SECONDS: Final = 10.0
"""How long a new connection has to tell whose it is."""
_NEWCOMERS: Final = 256
"""Connections that have not told it yet, at most: this process needs files for other things."""
_STOPPED: Final = 3
"""Looks without a sign of life after which the coordinator looks whether a process on its machine is stopped."""
_TOLD: Final = 8
"""Failures that a message tells of, at most."""

Reduce = Callable[[Mapping[int, bytes]], Any]
"""What all ranks are told of what they have brought, by rank."""


class Answer(NamedTuple):
    """`error`: what all ranks raise instead of a `value`. `over`: no operation can succeed any more.

    `late`: since a rank did not come before the deadline.
    """

    value: Any = None
    error: ZeroweaveError | None = None
    over: bool = False
    late: bool = False


class Coordinator:
    """Rank 0 makes one for `world` ranks, and closes it behind its alarm. `reduce`: by kind of operation."""

    def __init__(
        self, world: int, listener: socket.socket, token: bytes, deadline_seconds: float, **reduce: Reduce
    ) -> None:
        self._world, self._token, self._deadline, self._reduce = world, token, deadline_seconds, reduce
        self._members = [Member() for _ in range(world)]
        self._connections: dict[tuple[str, int], Connection] = {}
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._forged = 0
        self._brought: dict[int, Brought] = {}
        self._since = 0.0  # the first of them came
        self._lost: set[int] = set()  # whose operations can not come any more
        self._over: Answer | None = None
        self._trail: Trail | None = None
        self._open = False  # is a failure?
        self._ended = ""  # why all ranks were told to end
        self._clock = RunningClock()
        self._looked = self._clock.look()
        self._down = Codec(token, b"down")
        self._parted, self._stop = threading.Event(), threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._waker, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="zeroweave coordinator", daemon=True)
        self._thread.start()

    def follow(self, trail: Trail) -> None:
        """Collectives of the other ranks are compared with these, rank 0's."""
        self._trail = trail

    def part(self, seconds: float = PARTING_SECONDS) -> None:
        """Returns when all ranks know that rank 0 has left, or have ended; after so many seconds at the latest."""
        self._parted.wait(seconds)

    def close(self) -> None:
        """Drops all connections."""
        self._stop.set()
        with suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for key, events in self._selector.select(LOOK_SECONDS):
                    self._go_on(key.fileobj, key.data, events)
                self._look(self._clock.look())
        finally:  # also where this thread fails: ranks that lose it end, and do not wait for it
            for connection in (*self._strangers, *self._connections.values()):
                connection.close()
            self._selector.close()
            for each in (self._listener, self._waker, self._woken):
                each.close()

    def _go_on(self, file: Any, connection: Connection | None, events: int) -> None:
        if file is self._listener:
            with suppress(OSError):
                sock, _ = self._listener.accept()
                self._strangers[Connection(sock, self._token, self._clock.look(), self._selector)] = None
        elif connection is not None and events & selectors.EVENT_WRITE:
            connection.write()
        elif connection is not None:
            self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            messages = connection.read()
        except Forged:
            self._forged += 1
            if self._forged == 1:
                warn("something that is no rank of this job has connected to its coordinator: it is ignored", 0)
            messages = None
        if messages is None:
            self._drop(connection)
            return
        for message in messages:
            if connection.owner is None:
                kind, rank, process = message
                if (kind, rank) in self._connections:  # a recorded greeting
                    self._drop(connection)
                    return
                connection.greeted((kind, rank))
                del self._strangers[connection]
                self._connections[kind, rank] = connection
                self._members[rank].greets(process, self._clock.look())
                connection.write(self._down.pack(WELCOME))
                if kind == "alarm":
                    self._tell_newcomer(rank)
            elif connection.owner[0] == "control":
                self._take(connection.owner[1], Brought(*message))
            else:
                self._hear(connection.owner[1], message)

    def _drop(self, connection: Connection) -> None:
        connection.close()
        if connection.owner is None:
            del self._strangers[connection]
            return
        kind, rank = connection.owner
        del self._connections[kind, rank]
        if kind == "control":
            self._lost.add(rank)
            self._miss(self._clock.look())
        else:
            self._members[rank].parts()

    def _send(self, kind: str, ranks: Iterable[int], *message: Any) -> None:
        """Over these ranks' connections of that kind; those that are gone get nothing."""
        data = self._down.pack(message)
        for rank in ranks:
            if connection := self._connections.get((kind, rank)):
                connection.write(data)

    # Operations

    def _take(self, rank: int, brought: Brought) -> None:
        """A rank comes to an operation."""
        if self._over is not None:
            self._send("control", [rank], *self._over)
            return
        if not self._brought:
            self._since = self._clock.look()
        self._brought[rank] = brought
        self._members[rank].comes(brought.label)
        if len(self._brought) < self._world:
            if self._lost:
                self._miss(self._clock.look())
            return
        everything, self._brought = self._brought, {}
        try:
            first = everything[0]
            for other, theirs in sorted(everything.items()):
                if not same(theirs.label, first.label):
                    raise AgreementError(
                        f"the ranks are in different places: rank 0 at '{first.label}', rank {other} at "
                        f"'{theirs.label}'{advice(first.label, theirs.label)}"
                    )
            answer = Answer(self._reduce[first.kind]({rank: everything[rank].data for rank in range(self._world)}))
        except ZeroweaveError as error:
            answer = Answer(error=error)
        self._send("control", (*range(1, self._world), 0), *answer)

    def _miss(self, now: float) -> None:
        """Ends the operation that some ranks wait in, where another one will not come to it or has not in time."""
        if not self._brought or self._over is not None:
            return
        missing = [rank for rank in range(self._world) if rank not in self._brought]
        deadline = min(brought.deadline for brought in self._brought.values())
        lost = self._lost.intersection(missing)
        if not lost and now - self._since <= deadline:
            return
        on = nodes(self._members)
        who = names(
            {rank: f"{on[rank]} (last seen at '{self._members[rank].place}')" for rank in sorted(lost or missing)}
        )
        label = next(iter(self._brought.values())).label
        how = (
            "will not arrive: the connection was lost"
            if lost
            else f"did not arrive within the deadline of {deadline:g} s"
        )
        error = AgreementError(f"[ZW502] at '{label}': {who} {how}")
        self._over = Answer(error=error, over=True, late=not lost)
        self._send("control", self._brought, *self._over)
        self._brought.clear()

    # Alarms

    def _hear(self, rank: int, message: Any) -> None:
        """What the alarm of a rank tells."""
        now, member = self._clock.look(), self._members[rank]
        match message:
            case Status() as status:
                member.tells(status, now)
                if status.left and rank == 0:
                    self._send("alarm", range(1, self._world), "left", status)
                if not status.left:
                    self._send("alarm", [rank], "heard", *self._common(status.issued))
            case Failure() as failure:
                member.fails(failure, now)
                if self._ended:
                    self._send("alarm", [rank], "verdict", False, [self._ended], False)
                elif not self._open:
                    self._open = True
                    self._judge(now)  # at once: what is final comes before the news that the rank leaves
            case ("marks", marks):
                self._differ(rank, marks)
            case ("parted",):
                member.knows()

    def _tell_newcomer(self, rank: int) -> None:
        """What the other alarms have heard before this one came."""
        if self._ended:
            self._send("alarm", [rank], "end", self._ended, False)
        elif (first := self._members[0].status).left:
            self._send("alarm", [rank], "left", first)

    def _common(self, issued: int) -> tuple[int, int | None]:
        """The last of so many collectives that rank 0 has issued, too, and its hash there, unless that is forgotten."""
        if (trail := self._trail) is None:
            return 0, None
        count = min(issued, trail.mark[0])
        return count, steady(partial(trail.hash_at, count))

    def _differ(self, rank: int, marks: tuple[Issued, ...]) -> None:
        """A rank has another hash than rank 0, and remembers these collectives."""
        trail = self._trail
        if trail is None or self._ended:
            return
        told = f"rank 0 and rank {rank} issued different collectives among their first {marks[-1].count}"
        found = explain(0, steady(lambda: trail.marks), rank, marks, trail.gathers_on_entry)
        self._end(f"{told}{found and ': '}{found}")

    def _look(self, now: float) -> None:
        """Applies the rules, as often as there may be something new."""
        for newcomer in list(self._strangers)[:-_NEWCOMERS]:
            self._drop(newcomer)
        if self._members[0].status.left or self._ended:
            others = (member for member in self._members[1:] if member.process)
            if all(m.parted or not m.there or (self._ended and m.failure) or is_stopped(m.process) for m in others):
                self._parted.set()
        if self._open and not self._ended:
            self._judge(now)
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._miss(now)
        for stranger in [each for each in self._strangers if now - each.since > _GREETING_SECONDS]:
            self._drop(stranger)
        for member in self._members:
            member.looked()
        if self._ended or self._open:
            return
        if found := waits_in_vain(self._members, self._brought):
            self._end(found)
            return
        silent = {rank: member for rank, member in enumerate(self._members) if member.looks > _STOPPED}
        stopped = {rank for rank, member in silent.items() if is_stopped(member.process)}
        if found := late(self._members, now, self._deadline, stopped):
            self._end(found, missed=True)

    def _judge(self, now: float) -> None:
        """Decides about the failures that are open, once that is possible."""
        shared = alike(self._members, now, self._deadline)
        if shared is None:
            return
        self._open = False
        failures = {rank: member.failure for rank, member in enumerate(self._members) if member.failure is not None}
        if shared:
            for member in self._members:
                member.survives()
            self._send("alarm", range(self._world), "verdict", True, [], False)
            return
        on = nodes(self._members)
        told = {rank: tell(rank, failure, on[rank]) for rank, failure in list(failures.items())[: _TOLD + 1]}
        reason = "; ".join(list(told.values())[:_TOLD])
        self._end(reason, any(failure.missed for failure in failures.values()), told)

    def _end(self, reason: str, missed: bool = False, told: Mapping[int, str] | None = None) -> None:
        """Ends every process that has not failed. Rank 0 comes last, because this thread ends with it.

        Those that have are told why the others end: `told` of each, or else the reason.
        """
        self._ended, self._open = reason, False
        self._over = self._over or Answer(error=RankFailure(reason), over=True)
        for rank in (*range(1, self._world), 0):
            if self._members[rank].failure is None:
                self._send("alarm", [rank], "end", reason, missed)
            else:
                known = [reason] if told is None else [each for other, each in told.items() if other != rank][:_TOLD]
                self._send("alarm", [rank], "verdict", False, known, missed)
