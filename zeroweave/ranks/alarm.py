"""The alarm: when a rank fails, the others learn of it and do not wait for it forever.

A rank that is blocked in a collective can only be ended. So each process has a thread that tells the coordinator, each
second, where this rank is, and ends the process, with the reason on stderr, when the coordinator says so:

1. Another rank reported a failure (`failed`), and this one did not fail in the same place. One of these shows it:
   - it fails elsewhere, or leaves;
   - it begins a collective, or an operation of the control group, that the failed rank had not begun;
   - it has waited `rules.ALIKE_SECONDS` in such a collective of a process group of the program's own;
   - it has done none of these by the deadline.
   If all ranks fail in the same place, no process is ended, and training can continue.
2. Another rank has left, or waits for this one in an agreement or at the beginning of a call, and this one has issued
   more collectives: it waits in one that the other will not issue.
3. Another process has ended through an uncaught exception.
4. A rank has waited in a collective for longer than the deadline. The rank that it waits for has issued fewer
   collectives, and no new one in that time. If that one is silent, too, it is given at least a minute of silence,
   unless it runs on rank 0's machine and its process is stopped. How long a rank computes, or is silent, while no
   other rank waits for it does not matter.
5. Another rank has issued other collectives than this one.

Without the coordinator the thread decides three things itself: that rank 0 has gone without a word, that it has been
silent for longer than the deadline while this rank waits, and that ranks have not met for a process group.

Where a rank was missed for longer than the deadline, in a collective or by the control group, every rank writes
Python's stacks before it ends.

A rank that closes its engine (`close`), or whose script ends without an exception, does not end the others. Rule 2
ends those that wait for it in a collective later.

An engine that is dropped without being destroyed leaves its alarm behind: the others must still learn how its
process ends, and closing waits for them, which a garbage collector must not. So an alarm keeps no engine alive.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from zeroweave._torch.distributed import collectives_begun
from zeroweave.errors import RankFailure
from zeroweave.ranks.channel import LOOK_SECONDS
from zeroweave.ranks.control import NO_ANSWER, Control
from zeroweave.ranks.coordinator import PARTING_SECONDS
from zeroweave.ranks.differ import ADVICE, in_vain
from zeroweave.ranks.process import (
    RunningClock,
    end_process,
    host_of,
    is_stopped,
    note,
    own,
    stacks_folder,
    write_stacks,
)
from zeroweave.ranks.rules import SILENCE
from zeroweave.ranks.start import BACKSTOP_SECONDS
from zeroweave.ranks.status import Failure, Status, Trail, Wait, describe, steady

CAUSE_SECONDS: Final = 2 * LOOK_SECONDS
"""Within this time the coordinator tells what broke a collective, if anybody knows."""
LOST_SECONDS = 5.0
"""How long an alarm that has lost the coordinator waits for its own process to end or close."""
_NEWS_SECONDS: Final = 0.3
"""Within this time what the coordinator has sent has come."""
_POLL_SECONDS: Final = 0.1
"""How often an alarm looks whether its process has to end, where no message tells it."""
_LOOKS: Final = 3
"""Looks without the coordinator that count: a job that was suspended as a whole and goes on has an answer before."""


class _Verdict(NamedTuple):
    """`alike`: all ranks share a failure. `known`: what the others told. `missed`: a rank did not come in time."""

    alike: bool
    known: Sequence[str]
    missed: bool


class Alarm:
    """One engine's alarm on this rank. Every rank makes one over its `control`.

    `step()`: the optimizer step this rank is in. The alarm's thread calls it, so it must be cheap and must not raise.
    It is kept until `close` or the end of the process, so it must not lead to the engine. `end(reason)` ends that.
    `trail` is the ledger: ranks compare what they issued even while they wait for each other in collectives that do not
    belong together. `fatal` says what happened once a failure was not shared by all ranks: no call of the engine can
    succeed then. In a world of 1 there is no thread, and all ranks share every failure.
    """

    def __init__(
        self, control: Control, trail: Trail, step: Callable[[], int], end: Callable[[str], None] = end_process
    ) -> None:
        self.rank, self.world = control.rank, control.world
        self.fatal: str | None = None
        self._control, self._trail, self._step, self._end = control, trail, step, end
        self._shared: str | None = None  # the last error that all ranks had
        self._process = os.getpid()
        self._there = control.address is not None
        if control.address is None:
            return
        self._stacks, self._rank_0 = stacks_folder(control.address.name), control.address.process
        if control.coordinator is not None:
            control.coordinator.follow(trail)
        self.channel = control.connect("alarm")
        self._clock = RunningClock()
        self._heard, self._missed_looks = self._clock.look(), 0
        self._first: Status | None = None  # rank 0's, when it has left
        self._asked: float | None = None  # since when this rank waits for a verdict; the thread takes it to answer
        self._verdicts = SimpleQueue[_Verdict]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroweave alarm", daemon=True)
        self._thread.start()
        # A thread that comes back from a wait into an interpreter that has ended aborts the process.
        atexit.register(self._at_exit)

    def failed(self, place: str, step: int, error: BaseException) -> bool:
        """To be called once per exception that leaves the engine, which is then raised again.

        True: all ranks failed at this step and place, after equally many collectives, and none was interrupted; they
        can go on together. False: they did not, or a connection is broken; `fatal` says what is known, and the alarms
        of the other ranks end them. It returns when that is certain, at the deadline at the latest.
        """
        if self.fatal is not None or not self._there:
            return self.fatal is None and self.world == 1
        if isinstance(error, RankFailure):
            # A broken connection is no cause. If the coordinator knows or finds one, this process is ended with that.
            self._thread.join(CAUSE_SECONDS)
        mine = Failure(
            step,
            place,
            self._trail.mark[0],
            describe(error),
            final=self._control.broken is not None or isinstance(error, RankFailure),
            operations=self._control.operations,
            missed=self._control.late,
            interrupted=isinstance(error, KeyboardInterrupt),
            begun=collectives_begun(),
        )
        noted = note(error)  # where the others end, torchrun ends this process, too
        told = f"rank {self.rank} failed in {place} at step {step}{self._latest()}"
        self.fatal = f"{told}; it was interrupted before the other ranks had answered"
        try:
            alike, known, missed = self._ask(mine)
        except BaseException:  # Ctrl-C: this rank goes on nowhere, whatever they decide
            self.channel.post(replace(mine, final=True))
            raise
        if (mine.missed or missed) and (where := write_stacks(self._stacks, self.rank)):
            error.add_note(where.removeprefix("; "))
        if alike:
            self.fatal, self._shared = None, mine.error
            if noted is not None:
                noted.unlink(missing_ok=True)
            return True
        known = known or ["no other rank failed alike"]
        self.fatal = "; ".join([told, *known])
        self._stop.set()  # the others end
        return False

    def _ask(self, mine: Failure) -> _Verdict:
        """What the ranks decide about the failures that they have now."""
        self._asked = time.monotonic()
        self.channel.post(mine)
        while True:
            alive = self._thread.is_alive()
            with suppress(Empty):
                return self._verdicts.get(timeout=LOOK_SECONDS if alive else 0.0)
            if not alive:
                return _Verdict(False, (), False)

    def _latest(self) -> str:
        """The last collective of this rank, in words: another rank may have issued something else with it."""
        text = self._trail.text_at(self._trail.mark[0])
        return f" behind its '{text}'" if text else ""

    def meet(self, place: str) -> None:
        """Returns when all ranks have come to the call of this name, before any of them issues a collective in it.

        Else its collectives would meet those of another call. A rank that issues one elsewhere is told who waits here.
        AgreementError where ranks meet in different calls, or one does not come before the deadline.
        """
        self._control.barrier(place, self._trail.mark[0])

    def close(self) -> None:
        """Leaves in order: no thread, no message and no action at exit remain. Before `Control.close`.

        Ranks may close at different times, after their last collective. Rank 0 waits until the others know: a moment
        if they live, some seconds at most. Closing twice does nothing.
        """
        self._leave("it closed its engine")

    def _run(self) -> None:
        """The thread, which alone uses the channel while it runs."""
        try:
            self._watch()
        finally:
            with suppress(ConnectionError):
                self.channel.flush()

    def _watch(self) -> None:
        """Tells where this rank is, hears what the coordinator says, and ends the process where it must."""
        lost, told = None, float("-inf")
        while not self._stop.is_set():
            now = self._clock.look()
            if lost is not None or self._first is not None:
                self._stop.wait(_POLL_SECONDS)
            else:
                try:
                    if now - told >= LOOK_SECONDS:
                        told, self._missed_looks = now, self._missed_looks + 1
                        self.channel.flush()
                        self.channel.send(steady(self._here))
                    message = self.channel.receive(told + LOOK_SECONDS - now)
                    if message is not None and self._hears(message):
                        return
                except ConnectionError:
                    lost = self._clock.look()
            if (reason := self._alone(self._clock.look(), lost)) is not None:
                self._ends(*reason)
                return

    def _here(self) -> Status:
        """Where this rank is. How many collectives it has issued is read first: a step may be finished meanwhile."""
        trail, (issued, digest) = self._trail, self._trail.mark
        waiting, wait = trail.waiting, None
        if waiting is not None:
            number, since = waiting
            seconds = self._clock.look() - self._clock.at(since)
            wait = Wait(number, seconds, trail.text_at(number), self._where(number))
        here = self._where(issued) or (trail.call and f"{trail.call}: {ADVICE}")
        return Status(issued, digest, here, trail.call, self._step(), wait, begun=collectives_begun())

    def _where(self, number: int) -> str:
        """Where this rank has issued its collective of that number, in words, and what to do."""
        issued = self._trail.issued_at(number)
        return "" if issued is None else in_vain(issued, self._trail.gathers_on_entry)

    def _hears(self, message: Any) -> bool:
        """What the coordinator says. True: there is nothing more to do, since the engine or the process has ended."""
        self._heard, self._missed_looks = self._clock.look(), 0
        match message:
            case ("heard", count, int(digest)) if steady(partial(self._trail.hash_at, count)) not in (None, digest):
                self.channel.send(("marks", steady(lambda: self._trail.marks)))
            case ("verdict", bool(alike), known, missed):
                self._answers(_Verdict(alike, known, missed))
                return not alike
            case ("left", first):
                self._first = first
                self.channel.send(("parted",))
            case ("end", reason, missed):
                self._ends(reason, missed)
                return True
        return False

    def _answers(self, verdict: _Verdict) -> bool:
        """Tells this rank's own thread, if that waits for it: once."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._verdicts.put(verdict)
        return asked is not None

    def _alone(self, now: float, lost: float | None) -> tuple[str, bool] | None:
        """Why this process must end, as it knows without the coordinator, and True if rank 0 did not come in time."""
        if self._first is not None:
            issued = self._trail.mark[0]
            if issued <= self._first.issued and self._asked is None:
                return None
            why = f"rank 0 issues no collective after its {self._first.issued}: {self._first.left}"
            return f"{why}; this rank has issued {issued} and is in step {self._step()}", False
        if lost is not None:
            over = self._asked is not None or now - lost > LOST_SECONDS
            host = host_of(self._rank_0)
            on = "" if host == host_of(own()) else f" on {host}"
            return (f"the process of rank 0{on} has gone without a word", False) if over else None
        collective, asked, meets = self._trail.waiting, self._asked, self._control.waiting
        waits = [meets, asked, collective and collective[1]]
        since = max((self._clock.at(time) for time in waits if time is not None), default=None)
        deadline = self._control.deadline_seconds
        longest = deadline + 2 * BACKSTOP_SECONDS  # a backend's own timeout is over by then
        if meets is not None and now - self._clock.at(meets) > longest:
            return f"the ranks have not found each other within the deadline of {deadline:g} s", True
        if since is None or self._missed_looks < _LOOKS or now - max(since, self._heard) <= deadline:
            return None
        if self._missed_looks < SILENCE and not is_stopped(self._rank_0):
            return None
        return f"{NO_ANSWER} within the deadline of {deadline:g} s", True

    def _ends(self, reason: str, missed: bool) -> None:
        """Ends this process, unless its own thread fails by itself."""
        if self._answers(_Verdict(False, [reason], missed)):
            return
        where = write_stacks(self._stacks, self.rank) if missed else ""
        if self._control.coordinator is not None:
            self._control.coordinator.part(_NEWS_SECONDS)
        self._end(f"rank {self.rank} is ended by its alarm: {reason}{where}")

    def _at_exit(self) -> None:
        """The interpreter ends and nobody has called `close`."""
        error = getattr(sys, "last_value", None)  # an exception that nobody caught
        if not self._there or os.getpid() != self._process:
            return
        # An error that all ranks had is news to nobody: each shows its own.
        if error is not None and self.fatal is None and describe(error) != self._shared:
            self.channel.post(Failure(self._step(), "the script", self._trail.mark[0], describe(error), final=True))
        self._leave("its process ended without closing the engine")
        self._control.close()

    def _leave(self, how: str) -> None:
        # A forked child has a copy of the object, but no thread, and does not speak for this rank.
        if not self._there or os.getpid() != self._process:
            self._there = False
            return
        self._stop.set()
        self.channel.post(replace(self._here(), left=how))
        self._thread.join(PARTING_SECONDS)
        if self._thread.is_alive():  # in the middle of a message that rank 0 does not read
            self.channel.shut()
            self._thread.join()
        with suppress(ConnectionError):
            self.channel.flush()  # it may have ended before
        if self._control.coordinator is not None:
            self._control.coordinator.part()
        self.channel.close()
        atexit.unregister(self._at_exit)
        self._there = False  # at last: where Ctrl-C comes in between, closing again does all of it
