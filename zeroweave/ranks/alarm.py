"""The alarm: when a rank fails, the others learn of it and do not wait for it forever.

A rank that is blocked in a collective can only be ended. So each process has a watcher thread (`watcher`)
that polls the board and ends its process, with the reason on stderr, when one of these is certain:

1. Another rank failed and told so (`failed`), and this one does not fail alike: it fails elsewhere, leaves, or
   begins a collective, or an operation of the control group, that the other had not begun when it failed; or it has
   begun such a one in a process group of the program's own, and waits there for `ALIKE_SECONDS`; or it does none of
   these before the deadline, however slow it is. If all ranks fail alike, nobody waits for anybody: no process is ended
   and training can go on. Which of the two it is, is decided once for all ranks by whoever knows first.
2. Another rank has issued all collectives of its step, or has left, and this one has issued more: it waits in
   a collective that the other will never issue.
3. Another process has ended through an uncaught exception, or was rank 0, which keeps the board, and has gone without
   a word.
4. This rank has waited past the deadline in a collective for a rank that has issued fewer, and none meanwhile. A rank
   that is silent, too, is given at least a minute of silence, unless its process is stopped on this machine. How long
   a rank computes, or is silent, while nobody waits for it does not matter. The deadline holds for rank 0's answers on
   the board as well (`answers`).
5. Another rank has issued other collectives than this one.

Where a rank was missed for longer than the deadline, in a collective or by the control group, every rank writes
Python's stacks before it ends (`stacks`).

A rank that leaves in order (`close`), or whose script ends without an exception, ends nobody by that, but by
rule 2 those that go on to wait for it.

An engine that is dropped without being destroyed leaves its alarm behind: the others must still learn how its
process ends, and closing waits for them, which a garbage collector must not. So an alarm keeps no engine alive.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from zeroweave._torch.distributed import collectives_begun
from zeroweave.errors import RankFailure
from zeroweave.ranks import stacks
from zeroweave.ranks.answers import Answers, answered
from zeroweave.ranks.board import Board
from zeroweave.ranks.compare import RankMissed
from zeroweave.ranks.control import Control
from zeroweave.ranks.process import is_gone, is_stopped, own
from zeroweave.ranks.running import RunningClock
from zeroweave.ranks.status import Failure, StatusLine, describe, question_of, read, tell
from zeroweave.ranks.watcher import LOOK_SECONDS, Trail, Watcher, end_process, note

CAUSE_SECONDS = 2 * LOOK_SECONDS
"""Within this time a watcher finds out what broke a collective, if anybody has told."""
PARTING_SECONDS = 5.0
"""How long rank 0 keeps the board for ranks that do not yet know that it has left."""


class Alarm:
    """One engine's alarm on this rank. Every rank makes one over its `control`.

    `progress()` -> (step, count): the step this rank is in and the collectives it has issued since the
    beginning. The watcher's thread calls it, so it must be cheap and must not raise; it is kept until `close` or
    the end of the process, so it must not lead to the engine. `end(reason)` ends the process. `trail` is the
    ledger: ranks compare what they issued even while they wait for each other in collectives that do not belong
    together. `fatal` says what happened once a failure was not shared by all ranks: no call of the engine can
    succeed then. In a world of 1 there is no thread and no board, and all ranks share every failure.
    """

    def __init__(
        self,
        control: Control,
        trail: Trail,
        progress: Callable[[], tuple[int, int]],
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.rank, self.world = control.rank, control.world
        self.fatal: str | None = None
        self._control, self._progress, self._trail = control, progress, trail
        self._shared: str | None = None  # the last error that all ranks had
        self._leaves: float | None = None  # since when it has waited for its threads to end
        self._process = os.getpid()
        self._line: StatusLine | None = None
        if control.board is None:
            return
        with answered(self.rank, control.deadline_seconds, grace=LOOK_SECONDS):
            self._line = StatusLine(control.board.connect())
            self._line.post(process=own())
        self._boards = control.board, self._line.board
        self._watcher = Watcher(self._line, progress, end, trail, control.deadline_seconds, lambda: control.operations)
        answers = Answers(self.rank, self._waiting_since, end, control.deadline_seconds, self._watcher.write_stacks)
        self._stop, self._gone = threading.Event(), threading.Event()
        self._thread, self._second = (
            threading.Thread(target=run, args=(stop,), name=name, daemon=True)
            for run, stop, name in (
                (self._watcher.run, self._stop, "zeroweave alarm"),
                (answers.run, self._gone, "zeroweave answers"),
            )
        )
        self._thread.start()
        self._second.start()
        # A thread that comes back from the store into an interpreter that has ended aborts the process.
        atexit.register(self._at_exit)

    def failed(self, place: str, step: int, error: BaseException) -> bool:
        """To be called once per exception that leaves the engine, which is then raised again.

        True: all ranks failed at this step and place, after equally many collectives, and none was interrupted; they
        can go on together. False: they did not, or a connection is broken; `fatal` says what is known, and the watchers
        of the other ranks end them. It returns when that is certain, at the deadline at the latest.
        """
        if self.fatal is not None or self._line is None:
            return self.fatal is None and self.world == 1
        if isinstance(error, RankFailure):
            # A broken connection is no cause. If the watcher knows or finds one, it ends this process with that.
            self._thread.join(CAUSE_SECONDS)
        line, count = self._line, self._progress()[1]
        broken = self._control.broken is not None or isinstance(error, RankFailure)
        missed = self._control.late or isinstance(error, RankMissed)
        mine = Failure(
            line.epoch,
            step,
            place,
            count,
            describe(error),
            final=broken,
            operations=self._control.operations,
            missed=missed,
            interrupted=isinstance(error, KeyboardInterrupt),
            others=collectives_begun(),
        )
        known: list[str] = []
        noted = note(error)  # where the others end, torchrun ends this process, too
        try:
            line.post(failure=mine)
            line.board.ring()
            alike = self._verdict(line.board, mine) == "alike"
            for rank, status in enumerate(read(line.board)):
                theirs = status.failure
                if rank != self.rank and theirs is not None and theirs.epoch == mine.epoch:
                    known.append(tell(rank, theirs))
                    missed = missed or theirs.missed
        except ConnectionError as lost:
            alike, known = False, [*self._watcher.heard(), str(lost)]
        if missed and (where := stacks.write(self._watcher.stacks, self.rank)):
            error.add_note(where.removeprefix("; "))
        if alike:
            self._shared = mine.error
            if noted is not None:
                noted.unlink(missing_ok=True)
            line.survive()
            return True
        known = known or ["no other rank failed alike"]
        self.fatal = "; ".join([f"rank {self.rank} failed in {place} at step {step}{self._latest()}", *known])
        if self.rank:
            self._stop.set()  # the others end, and rank 0 takes the board with it
        return False

    def _latest(self) -> str:
        """The last collective of this rank, in words: another rank may have issued something else with it."""
        text = self._trail.text_at(self._trail.mark[0])
        return f" behind its '{text}'" if text else ""

    def post_counts(self, step: int, count: int) -> None:
        """Tells that this rank has issued all its collectives before the agreement of `step`.

        `count`: their number since the beginning. Called before `Control.agree`; a rank that has already
        issued more and does not come is stuck, and its watcher ends it.
        """
        if self._line is not None:
            with suppress(ConnectionError):  # the agreement that follows fails and says why
                self._line.finish(step, count)

    def meet(self, place: str, call: str) -> None:
        """Returns when all ranks have come to the call of this name, before any of them issues a collective in it.

        Else its collectives would meet those of another call. A rank that issues one elsewhere is told who waits here.
        AgreementError where ranks meet in different calls, or one does not come before the deadline.
        """
        if self._line is not None:
            with suppress(ConnectionError):  # the meeting fails and says why
                meetings = self._line.status.meetings + 1
                self._line.post(meetings=meetings, count=self._progress()[1], call=call)
                self._line.board.ring()
        self._control.barrier(place)

    def close(self) -> None:
        """Leaves in order: no thread, no message and no action at exit remain. Before `Control.close`.

        Ranks may close at different times, after their last collective. Rank 0 waits until the others know: a
        tenth of a second if they live, `PARTING_SECONDS` at most. Closing twice does nothing.
        """
        self._leave("it closed its engine")

    def _waiting_since(self) -> float | None:
        """Since when this rank has waited for an answer of rank 0's that it needs to go on, if it does.

        The user's thread needs what it asks. What the watcher asks it needs where it waits for other ranks, or for the
        watcher. The earliest counts: an operation that has waited in vain asks who is missing, and waits on.
        """
        asks = {thread: since for board in self._boards for thread, since in board.asks.items()}
        watcher = asks.pop(self._thread.ident or 0, None)
        collective = self._trail.waiting
        waits = [self._control.waiting, self._leaves, None if collective is None else collective[1]]
        since = max((time for time in waits if time is not None), default=None)
        needed = list(asks.values())
        if watcher is not None and since is not None:
            needed.append(max(watcher, since))
        return min(needed, default=None)

    def _verdict(self, board: Board, mine: Failure) -> str:
        """What the ranks decide about the failures of this epoch: "alike", or else it is fatal."""
        question, clock = question_of(mine), RunningClock()
        begin = clock.look()
        while (decided := board.decided(question)) is None:
            statuses = read(board)
            failures = [status.failure for status in statuses]
            same = [failure for failure in failures if failure is not None and failure.epoch == mine.epoch]
            if any(failure.final or failure.spot != mine.spot for failure in same):
                return board.decide(question, "different")
            if len(same) == self.world:
                # Nobody knows how far an interrupted call came: one rank may have written, or issued, what another did
                # not. Asked last, so that each of them gets the time to fail by itself.
                interrupted = any(failure.interrupted for failure in same)
                return board.decide(question, "different" if interrupted else "alike")
            late = clock.look() - begin > self._control.deadline_seconds
            if late or any(status.left or is_gone(status.process) for status in statuses):
                return board.decide(question, "alone")
            time.sleep(0.02)
        return decided

    def _at_exit(self) -> None:
        """The interpreter ends and nobody has called `close`."""
        line, error = self._line, getattr(sys, "last_value", None)  # an exception that nobody caught
        if line is None or os.getpid() != self._process:
            return
        # An error that all ranks had is news to nobody: each shows its own.
        if error is not None and self.fatal is None and describe(error) != self._shared:
            step, count = self._progress()
            news = Failure(line.epoch, step, "the script", count, describe(error), final=True)
            with suppress(ConnectionError):
                line.post(failure=news)
        self._leave("its process ended without closing the engine")
        self._control.close()

    def _leave(self, how: str) -> None:
        line, self._line = self._line, None
        # A forked child has a copy of the object, but no thread, and does not speak for this rank.
        if line is None or os.getpid() != self._process:
            return
        stopped = self._stop.is_set()
        self._stop.set()
        self._leaves = time.monotonic()
        self._thread.join(PARTING_SECONDS)  # it may still wait for an answer then
        with suppress(ConnectionError):
            if not (self._watcher.host_left or stopped):
                line.post(count=self._progress()[1], left=how)
                line.board.ring()
            if self.rank == 0:
                self._await_others(line.board)
        self._gone.set()
        self._second.join()
        atexit.unregister(self._at_exit)
        line.board.close()

    def _await_others(self, board: Board) -> None:
        deadline = time.monotonic() + PARTING_SECONDS
        while time.monotonic() < deadline:
            waiting = [status.process for status in read(board) if not (status.left or status.parted)]
            if all(is_gone(process) or is_stopped(process) for process in waiting):
                return
            time.sleep(0.02)
