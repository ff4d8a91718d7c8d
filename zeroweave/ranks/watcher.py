"""The watcher, which reads what ranks tell about themselves and decides when this process must end.

The rules are in `alarm`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from zeroweave._torch.distributed import collectives_begun
from zeroweave.errors import RankFailure
from zeroweave.ranks import stacks
from zeroweave.ranks.differ import ADVICE, Issued, dump, explain, in_vain, parse
from zeroweave.ranks.process import is_stopped
from zeroweave.ranks.running import RunningClock
from zeroweave.ranks.status import Failure, RankStatus, StatusLine, question_of, read, tell

ALIKE_SECONDS = 10.0
"""How long a failure waits for ranks that have begun a collective of the program's own which the failed one had not.

They wait for the failed one, unless another thread of it comes to that. Others are waited for up to the deadline.
"""
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""How often a watcher reads the board, and shows that it lives, when nobody rings."""
SILENCE = 60
"""Looks without a sign of life after which a rank that is late is so for certain.

Of one that lives it takes a new word to know that it has not come: it may have, while a compiler held Python's lock.
"""
_STOPPED = 3
"""Looks without a sign of life after which it is asked whether a process is stopped."""
LOST_SECONDS = 30.0
"""How long a watcher that has lost the board waits for its own process to end or close."""
_NEWS_SECONDS = 0.3
"""Within this time every watcher has heard a ring."""
_ANSWER_SECONDS = 1.0
"""How long a watcher waits for what another rank remembers of its collectives."""


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
    def issued_at(self, count: int) -> Issued | None: ...


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
        begun: Callable[[], Mapping[str, int]] = collectives_begun,
    ) -> None:
        self._operations, self._begun = operations, begun
        self._line, self._board, self._progress, self._end = line, line.board, progress, end
        self._trail, self._deadline = trail, deadline_seconds
        self._clock = RunningClock()
        self._statuses: list[RankStatus] = []
        self._rung: bytes | None = None
        self._looked = self._read_at = float("-inf")
        self._lost_since: float | None = None
        self._seen: dict[tuple[int, int], float] = {}  # when the failure (rank, epoch) was first seen
        self._beats: dict[int, tuple[int, int]] = {}  # per rank its last beat, and the looks since then
        self._issued: dict[int, tuple[int, float]] = {}  # per rank what it had issued, and when that was seen first
        self._overdue: tuple[int, dict[int, int]] | None = None  # collective, and the beats of who has not come to it
        self._remembered = False  # has this rank told what it remembers?
        self._missed = False  # was a rank missed for longer than the deadline?
        self.rank, self.stacks = line.board.rank, stacks.folder(line.board)

    @property
    def host_left(self) -> bool:
        """Whether rank 0 has left in order. It drops the board when all know, so nothing is read any more."""
        return bool(self._board.rank != 0 and self._statuses and self._statuses[0].left)

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(POLL_SECONDS):
            now = self._clock.look()
            told = self.look(now)
            found = told or self.find(now)
            if found is not None and not stop.is_set():
                where = self.write_stacks() if self._missed else ""
                self._part(found, ours=told is None)
                self._end(f"rank {self.rank} is ended by its alarm: {found}{where}")
                return

    def write_stacks(self) -> str:
        """Writes where all threads of this process are; the end of a message that says where that is, or ""."""
        return stacks.write(self.stacks, self.rank)

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
            patience = min(ALIKE_SECONDS, self._deadline) if self._waits_elsewhere(failure) else self._deadline
            gone_on = self._is_past(failure) or now - since >= patience
            over = failure.final or bool(status.left) or gone_on
            # Asked last: this rank's own thread may have failed meanwhile.
            if self._is_fatal(failure, over) and not self._line.failing:
                self._missed = failure.missed
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
            if count <= status.count:
                continue
            if status.left:
                why = f"rank {rank} issues no collective after its {status.count}: {status.left}"
            elif status.meetings > mine.meetings:
                why = f"rank {rank} is {status.call} after {status.count} collectives"
            elif status.steps > mine.steps:
                why = f"rank {rank} finished step {status.step} with {status.count} collectives"
            else:
                continue
            here = f"{why}; this rank has issued {count} and is in step {step}"
            where = self._where(count) or (self._trail.call and f"{self._trail.call}: {ADVICE}")
            return f"{here}, {where}" if where else here
        return None

    def _late(self) -> str | None:
        """Has this rank waited in a collective for longer than the deadline for ranks that have not come to it?

        They have issued fewer, and nothing more for as long. What they say is some time old when it is read: only
        what they have said after the deadline counts, or that they have said nothing for `SILENCE` looks, or that their
        processes are stopped. A rank that nobody waits for may be silent for as long as it likes.
        """
        waiting = self._trail.waiting
        missing = {} if waiting is None else self._missing(waiting[0])
        if waiting is None or not missing:
            self._overdue = None
            return None
        number, since = waiting
        begin = max(self._clock.at(since), *(self._issued[rank][1] for rank in missing))
        if self._read_at - begin <= self._deadline:
            self._overdue = None
            return None
        beats = {rank: status.beat for rank, status in missing.items()}
        if self._overdue is None or self._overdue[0] != number or self._overdue[1].keys() != beats.keys():
            self._overdue = number, beats
            return None
        silent = {rank: self._beats[rank][1] for rank, beat in self._overdue[1].items() if beats[rank] == beat}
        stopped = self._stopped()
        if any(looks < SILENCE for rank, looks in silent.items() if rank not in stopped):
            return None
        lasting = {rank: f", no sign of life for {looks * LOOK_SECONDS:g} s" for rank, looks in silent.items()}
        lasting |= dict.fromkeys(stopped, ", its process is stopped")
        who = " and ".join(
            f"rank {rank} ({status.call or 'before its first call'}, after {status.issued} collectives"
            f"{lasting.get(rank, '')})"
            for rank, status in missing.items()
        )
        what = f"collective {number} ('{self._trail.text_at(number)}')"
        self._missed = True
        told, where = f"{who} did not come to {what} within the deadline of {self._deadline:g} s", self._where(number)
        return f"{told}; rank {self.rank} waits for it {where}" if where else told

    def _where(self, number: int) -> str:
        """Where this rank has issued its collective of that number, in words, and what to do."""
        issued = self._trail.issued_at(number)
        return "" if issued is None else in_vain(issued, self._trail.gathers_on_entry)

    def _missing(self, number: int) -> dict[int, RankStatus]:
        """Whom a rank waits for that has come to this collective: the stopped ones, else those farthest behind."""
        there = {rank: status for rank, status in self._others() if not status.left}
        if stopped := self._stopped() & there.keys():  # one may have come, and be stopped in the middle of it
            return {rank: there[rank] for rank in sorted(stopped)}
        least = min((status.issued for status in there.values()), default=number)
        return {rank: status for rank, status in there.items() if status.issued == least < number}

    def _stopped(self) -> set[int]:
        """The silent ranks whose processes are stopped, as far as they run on this machine."""
        silent = [rank for rank, (_, looks) in self._beats.items() if looks >= _STOPPED]
        return {rank for rank in silent if is_stopped(self._statuses[rank].process)}

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

    def _waits_elsewhere(self, failure: Failure) -> bool:
        """Has this rank begun a collective in a group of the program's own that the failed one had not begun?"""
        begun = self._begun()
        return any(begun.get(group, 0) > count for group, count in failure.others.items())

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
                news = Failure(self._line.epoch, step, "its alarm", count, reason, final=True, missed=self._missed)
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


def note(error: BaseException) -> Path | None:
    """Leaves an exception to torchrun, unless there is one already. The new file, or None."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place is None or os.path.exists(place):
        return None
    with suppress(OSError):  # a full disk must not hide the reason
        get_error_handler().record_exception(error)
    return Path(place)


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
    failure = RankFailure(reason)
    note(failure)
    os.write(2, f"zeroweave: {failure}\n".encode())
    os._exit(1)
