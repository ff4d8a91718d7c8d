"""Ctrl-C at each line of what a rank's own thread does with the coordinator: no rank waits, no answers are mixed up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import zeroweave.ranks
from zeroweave.comm.ledger import Ledger
from zeroweave.errors import RankFailure
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Address, Control, coordinate, listen
from zeroweave.ranks.process import own

pytestmark = pytest.mark.matrix

FOLDER = str(Path(zeroweave.ranks.__file__).parent)
AT_ONCE = 20.0
"""Seconds: far less than the deadline, far more than anything here takes."""
DEADLINE = 300.0


class Interrupt:
    """Raises KeyboardInterrupt in this thread, once, before line number `at` of zeroweave/ranks that it comes to."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.came = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._enters)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enters(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(FOLDER) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.came:
            self._left -= 1
            if self._left == 0:
                self.came = True
                raise KeyboardInterrupt
        return self._line


class Rank:
    """A control group and its alarm; `ends`: what the latter would have ended the process for."""

    def __init__(self, control: Control) -> None:
        self.control, self.ends = control, list[str]()
        self.alarm = Alarm(control, Ledger(2, control.rank), lambda: 0, self.ends.append)

    def fails(self) -> bool:
        return self.alarm.failed("forward", 0, ValueError("bad batch"))

    def close(self) -> None:
        self.alarm.close()
        self.control.close()


@contextmanager
def two_ranks() -> Iterator[tuple[Rank, Rank]]:
    with listen("127.0.0.1") as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], "test", own(), b"secret")
        coordinator = coordinate(2, listener, b"secret", DEADLINE)
        ranks = [Rank(Control(rank, 2, DEADLINE, address, None if rank else coordinator)) for rank in range(2)]
        yield ranks[0], ranks[1]
        for rank in reversed(ranks):
            rank.close()


def started(function: Callable[[], Any]) -> Future[Any]:
    """Runs it in a thread that keeps no test from its end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def soon(condition: Callable[[], Any]) -> bool:
    end = time.monotonic() + AT_ONCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(condition())


def at_each_line(attempt: Callable[[int], bool]) -> int:
    """How many lines there are: `attempt` returns whether it was interrupted."""
    before, at = threading.active_count(), 1
    while attempt(at):
        at += 1
    assert soon(lambda: threading.active_count() == before), threading.enumerate()
    return at - 1


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_operation_is_whole_or_the_last(interrupted: int) -> None:
    def attempt(at: int) -> bool:
        with two_ranks() as ranks:
            mine, other = ranks[interrupted], ranks[1 - interrupted]
            theirs = started(lambda: [other.control.all_gather_object((other.control.rank, n)) for n in range(2)])
            interrupt = Interrupt(at)
            with interrupt, suppress(KeyboardInterrupt):
                mine.control.all_gather_object((interrupted, 0))
            if mine.control.broken is None:
                for n in range(mine.control.operations, 2):
                    assert mine.control.all_gather_object((interrupted, n)) == [(0, n), (1, n)]
                assert theirs.result(AT_ONCE) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
                return interrupt.came
            assert interrupt.came
            with pytest.raises(RankFailure, match="an operation was interrupted"):
                mine.control.barrier()
            # As the guard does when the interrupt leaves the engine's call; the other rank's process is ended.
            assert not mine.alarm.failed("step", 0, KeyboardInterrupt())
            assert soon(lambda: other.ends) and "KeyboardInterrupt" in other.ends[0]
            assert other.control.channel is not None
            other.control.channel.shut()
            with pytest.raises(RankFailure):
                theirs.result(AT_ONCE)
            return interrupt.came

    assert at_each_line(attempt) > 20


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_failure_is_told_or_its_rank_leaves(interrupted: int) -> None:
    """Both ranks fail alike; one is interrupted while it tells that, or hears what the ranks decide."""

    def attempt(at: int) -> bool:
        with two_ranks() as ranks:
            mine, other = ranks[interrupted], ranks[1 - interrupted]
            theirs, interrupt, shared = started(other.fails), Interrupt(at), None
            with interrupt, suppress(KeyboardInterrupt):
                shared = mine.fails()
            if shared is None:  # the program goes on, and ends
                mine.close()
            begin = time.monotonic()
            assert theirs.result(AT_ONCE) == (other.alarm.fatal is None)
            assert time.monotonic() - begin < AT_ONCE
            assert shared is None or shared
            assert not mine.ends
            # It may have been interrupted when both already had the answer; then the other one goes on, and is ended.
            assert not other.ends or (interrupt.came and f"rank {interrupted} failed in forward" in other.ends[0])
            return interrupt.came

    assert at_each_line(attempt) > 20


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_close_that_is_interrupted_is_made_again(interrupted: int) -> None:
    def attempt(at: int) -> bool:
        with two_ranks() as ranks:
            mine, other = ranks[interrupted], ranks[1 - interrupted]
            begin, interrupt = time.monotonic(), Interrupt(at)
            theirs = started(other.close)
            with interrupt, suppress(KeyboardInterrupt):
                mine.close()
            mine.close()
            theirs.result(AT_ONCE)
            assert time.monotonic() - begin < AT_ONCE
            assert not mine.ends and not other.ends
            return interrupt.came

    assert at_each_line(attempt) > 20
