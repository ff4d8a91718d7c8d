"""What a rank tells the others about itself, and the watcher that reads what they tell.

`RankStatus` is a rank's line on the board, `StatusLine` this rank's own; `Watcher` decides when this process must end.
The rules are in `alarm`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from pydantic import TypeAdapter

from zeroweave.ranks.board import Board
from zeroweave.ranks.differ import ADVICE, Issued, dump, explain, parse

ALIKE_SECONDS = 10.0
"""How long a failure that no other rank has gone past waits for them to fail alike."""
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""How often a watcher reads the board, and shows that it lives, when nobody rings."""
SILENCE = 60
"""Looks without a sign of life after which a rank that is late is so for certain.

Of one that lives it takes a new word to know that it has not come: it may have, while a compiler held Python's lock.
"""
LOST_SECONDS = 30.0
"""How long a watcher that has lost the board waits for its own process to end or close."""
_NEWS_SECONDS = 0.3
"""Within this time every watcher has heard a ring."""
_ANSWER_SECONDS = 1.0
"""How long a watcher waits for what another rank remembers of its collectives."""


@dataclass(frozen=True)
class Failure:
    """An exception that left the engine on one rank; `final` if the others cannot share it.

    `epoch` counts the failures that all ranks have survived together before; `count` the collectives issued,
    `operations` those of the control group.
    """

    epoch: int
    step: int
    place: str
    count: int
    error: str
    final: bool = False
    operations: int = 0

    @property
    def spot(self) -> tuple[int, str, int, int]:
        """Where it happened. The counts belong to it: after different collectives ranks cannot go on."""
        return self.step, self.place, self.count, self.operations


@dataclass(frozen=True)
class RankStatus:
    """A rank's line on the board.

    `issued`, `trail`, `latest`: how many collectives it had issued when it last showed that it lives, their hash,
    and the last of them in words. `call`: where it was then, "in forward" or "after step".
    `asks`: it wants to know what the others remember of their collectives.
    `step`, `count`: the last step whose collectives this rank has all issued (-1: none) and their number
    since the beginning; `meetings`: how often it has come to meet the others in a call, the last time after `count`;
    once it has `left`, the number of all it will ever issue. `left`: how, "" while it is
    there. `parted`: it knows that rank 0 has left.
    """

    beat: int = 0
    issued: int = 0
    trail: int | None = None
    latest: str = ""
    call: str = ""
    asks: bool = False
    step: int = -1
    count: int = 0
    meetings: int = 0
    left: str = ""
    parted: bool = False
    failure: Failure | None = None

    def dump(self) -> str:
        return _STATUS.dump_json(self).decode()

    @classmethod
    def parse(cls, text: str) -> RankStatus:
        return _STATUS.validate_json(text) if text else cls()


_STATUS: Final = TypeAdapter(RankStatus)


class StatusLine:
    """This rank's line, written by both threads. `epoch`: failures that all ranks have survived together."""

    def __init__(self, board: Board) -> None:
        self.board, self.epoch, self.status = board, 0, RankStatus()
        self._lock = threading.Lock()

    def post(self, **changes: Any) -> None:
        with self._lock:
            self.status = replace(self.status, **changes)
            self.board.post("status", self.status.dump())

    def survive(self) -> None:
        """All ranks have failed alike, and go on."""
        self.epoch += 1

    @property
    def failing(self) -> bool:
        """Whether this rank has failed itself: its own thread then decides what happens to it."""
        failure = self.status.failure
        return failure is not None and failure.epoch == self.epoch


class Trail(Protocol):
    """What this rank's ledger remembers; see `Ledger`."""

    call: str
    waiting: tuple[int, float] | None
    gathers_on_entry: bool

    @property
    def mark(self) -> tuple[int, int]: ...
    @property
    def marks(self) -> tuple[Issued, ...]: ...
    def hash_at(self, count: int) -> int | None: ...
    def text_at(self, count: int) -> str: ...


class Watcher:
    """Looks at the board until told to stop, and calls `end(reason)`, once, when this process must end."""

    def __init__(
        self,
        line: StatusLine,
        progress: Callable[[], tuple[int, int]],
        end: Callable[[str], None],
        trail: Trail,
        deadline_seconds: float,
        operations: Callable[[], int],
    ) -> None:
        self._operations = operations
        self._line, self._board, self._progress, self._end = line, line.board, progress, end
        self._trail, self._deadline = trail, deadline_seconds
        self._statuses: list[RankStatus] = []
        self._rung = -1
        self._looked = self._read_at = float("-inf")
        self._lost_since: float | None = None
        self._seen: dict[tuple[int, int], float] = {}  # when the failure (rank, epoch) was first seen
        self._beats: dict[int, tuple[int, int]] = {}  # per rank its last beat, and the looks since then
        self._issued: dict[int, tuple[int, float]] = {}  # per rank what it had issued, and when that was seen first
        self._overdue: tuple[int, dict[int, int]] | None = None  # collective, and the beats of who has not come to it
        self._remembered = False  # has this rank told what it remembers?

    @property
    def host_left(self) -> bool:
        """Whether rank 0 has left in order. It drops the board when all know, so nothing is read any more."""
        return bool(self._board.rank != 0 and self._statuses and self._statuses[0].left)

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(POLL_SECONDS):
            now = time.monotonic()
            told = self.look(now)
            found = told or self.find(now)
            if found is not None and not stop.is_set():
                self._part(found, ours=told is None)
                self._end(f"rank {self._board.rank} is ended by its alarm: {found}")
                return

    def look(self, now: float) -> str | None:
        """Reads the board if it is time to; what another rank says that must end this process, or None."""
        try:
            if not self.host_left:
                self._read(now)
        except ConnectionError:
            self._lost_since = now if self._lost_since is None else self._lost_since
        if self._line.failing:
            return None
        for rank, status in self._others():
            failure = status.failure
            if failure is None or failure.epoch != self._line.epoch:
                continue
            since = self._seen.setdefault((rank, failure.epoch), now)
            gone_on = self._is_past(failure) or now - since >= min(ALIKE_SECONDS, self._deadline)
            over = failure.final or bool(status.left) or gone_on
            # Asked last: this rank's own thread may have failed meanwhile.
            if self._is_fatal(failure, over) and not self._line.failing:
                return "; ".join(self.heard())  # all: a broken connection is no cause, but what broke it is one
        return None

    def heard(self) -> list[str]:
        """What the other ranks had told of failures when the board was last read."""
        failures = [(rank, status.failure) for rank, status in self._others()]
        return [tell(rank, f) for rank, f in failures if f is not None and f.epoch == self._line.epoch]

    def find(self, now: float) -> str | None:
        """What this rank can tell by itself that must end its process, or None."""
        if self._line.failing:
            return None
        return self._differs() or self._waits_in_vain() or self._late() or self._lost(now)

    def _differs(self) -> str | None:
        """Has another rank issued other collectives?"""
        for rank, status in self._others():
            ours = None if status.trail is None else self._trail.hash_at(status.issued)
            if ours is not None and ours != status.trail:
                told = f"it and rank {rank} issued different collectives among their first {status.issued}"
                latest = f"the last of them was '{status.latest}' there, '{self._trail.text_at(status.issued)}' here"
                return f"{told}: {self._first_difference(rank) or latest}"
        return None

    def _first_difference(self, rank: int) -> str:
        try:
            self._tell_marks()
            self._line.post(asks=True)
            self._board.ring()
            end = time.monotonic() + _ANSWER_SECONDS
            while not (answer := self._board.read("marks")[rank]) and time.monotonic() < end:
                time.sleep(0.02)
        except ConnectionError:
            return ""
        return explain(self._board.rank, self._trail.marks, rank, parse(answer), self._trail.gathers_on_entry)

    def _tell_marks(self) -> None:
        if not self._remembered:
            self._remembered = True
            self._board.post("marks", dump(self._trail.marks))

    def _waits_in_vain(self) -> str | None:
        """Will another rank never come to what this one has issued?"""
        step, count = self._progress()
        mine = self._line.status  # read after the progress: an agreement may have been reached between
        for rank, status in self._others():
            here = f"this rank has issued {count} and is in step {step}"
            if self._trail.call:
                here = f"{here}, {self._trail.call}: {ADVICE}"
            if status.left and count > status.count:
                return f"rank {rank} issues no collective after its {status.count}: {status.left}; {here}"
            if status.meetings > mine.meetings and count > status.count:
                return f"rank {rank} is {status.call} after {status.count} collectives; {here}"
            if status.step > mine.step and count > status.count:
                return f"rank {rank} finished step {status.step} with {status.count} collectives; {here}"
        return None

    def _late(self) -> str | None:
        """Has this rank waited in a collective for longer than the deadline for ranks that have not come to it?

        They have issued fewer, and nothing more for as long. What they say is some time old when it is read: only
        what they have said after the deadline counts, or that they have said nothing for `SILENCE` looks. A rank that
        nobody waits for may be silent for as long as it likes.
        """
        waiting = self._trail.waiting
        behind = {} if waiting is None else {r: s for r, s in self._others() if not s.left and s.issued < waiting[0]}
        if waiting is None or not behind:
            self._overdue = None
            return None
        least = min(status.issued for status in behind.values())
        missing = {rank: status for rank, status in behind.items() if status.issued == least}
        number, since = waiting
        begin = max(since, *(self._issued[rank][1] for rank in missing))
        if self._read_at - begin <= self._deadline:
            self._overdue = None
            return None
        beats = {rank: status.beat for rank, status in missing.items()}
        if self._overdue is None or self._overdue[0] != number or self._overdue[1].keys() != beats.keys():
            self._overdue = number, beats
            return None
        silent = {rank: self._beats[rank][1] for rank, beat in self._overdue[1].items() if beats[rank] == beat}
        if any(looks < SILENCE for looks in silent.values()):
            return None
        who = " and ".join(
            f"rank {rank} ({status.call or 'before its first call'}, after {status.issued} collectives"
            f"{f', no sign of life for {silent[rank] * LOOK_SECONDS:g} s' if rank in silent else ''})"
            for rank, status in missing.items()
        )
        what = f"collective {number} ('{self._trail.text_at(number)}')"
        return f"{who} did not come to {what} within the deadline of {self._deadline:g} s"

    def _lost(self, now: float) -> str | None:
        """Has the process gone that keeps the board?"""
        if self._lost_since is not None and now - self._lost_since > LOST_SECONDS:
            return "the process of rank 0 has gone without a word"
        return None

    def _others(self) -> list[tuple[int, RankStatus]]:
        return [(rank, status) for rank, status in enumerate(self._statuses) if rank != self._board.rank]

    def _read(self, now: float) -> None:
        rung, timed = self._board.rung(), now - self._looked >= LOOK_SECONDS
        if timed:
            self._looked = now
            issued, trail = self._trail.mark
            beat, latest = self._line.status.beat + 1, self._trail.text_at(issued)
            self._line.post(beat=beat, issued=issued, trail=trail, latest=latest, call=self._trail.call)
        if timed or rung != self._rung:
            self._rung = rung
            self._statuses, self._read_at = read(self._board), now
            for rank, status in enumerate(self._statuses):
                if self._issued.get(rank, (-1, now))[0] != status.issued:
                    self._issued[rank] = status.issued, now
            if self.host_left:
                self._line.post(parted=True)
            if any(status.asks for _, status in self._others()):
                self._tell_marks()
        if timed:
            for rank, status in enumerate(self._statuses):
                beat, looks = self._beats.get(rank, (-1, 0))
                self._beats[rank] = (status.beat, looks + 1 if status.beat == beat else 0)

    def _is_past(self, failure: Failure) -> bool:
        """Has this rank begun something that the failed one had not begun? It can then no longer fail alike."""
        return self._progress()[1] > failure.count or self._operations() > failure.operations

    def _is_fatal(self, failure: Failure, over: bool) -> bool:
        question = question_of(failure)
        try:
            verdict = self._board.decide(question, "alone") if over else self._board.decided(question)
        except ConnectionError:
            return over
        return verdict not in (None, "alike")

    def _part(self, reason: str, ours: bool) -> None:
        """Tells the others, if it is news to them, and leaves."""
        step, count = self._progress()
        with suppress(ConnectionError):
            if ours:
                news = Failure(self._line.epoch, step, "its alarm", count, reason, final=True)
                self._line.post(failure=news)
            self._line.post(count=count, left="its alarm ended it")
            self._board.ring()
            if ours:
                time.sleep(_NEWS_SECONDS)  # rank 0 takes the board with it
            elif self._board.rank == 0:
                end = time.monotonic() + _NEWS_SECONDS
                while time.monotonic() < end and not all(s.left or s.failure for _, s in self._others()):
                    time.sleep(0.02)
                    self._statuses = read(self._board)


def read(board: Board) -> list[RankStatus]:
    """Every rank's status, in rank order."""
    return [RankStatus.parse(text) for text in board.read("status")]


def question_of(failure: Failure) -> str:
    """The board's question whether all ranks share the failures of this epoch: "alike", or it is fatal."""
    return f"failure {failure.epoch}"


def tell(rank: int, failure: Failure) -> str:
    return f"rank {rank} failed in {failure.place} at step {failure.step}: {failure.error}"


def describe(error: BaseException, limit: int = 2000) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {error}"[:limit]


def end_process(reason: str) -> None:
    """Ends this process at once, whatever its other threads wait for. Exit code 1, the reason on stderr."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    # In a thread of its own: a full pipe must not hold this up.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(0.2)
    os.write(2, f"zeroweave: {reason}\n".encode())
    os._exit(1)
