"""Signals are noted while an engine listens, and do before and after what they did without one."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from zeroweave.errors import EngineError
from zeroweave.ranks.signals import NUMBERS, Notes, check_thread, listen

TERM, USR1 = NUMBERS


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the program's own handlers, which are there before, have heard."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in NUMBERS}
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_until_the_ranks_know_of_it(heard: list[int]) -> None:
    notes = Notes(NUMBERS)
    assert notes.flags == b"\0\0"
    listening = listen(notes)
    send(USR1)
    assert notes.flags == b"\0\1" and not notes.take(NUMBERS)
    notes.agree(b"\1\1")  # another rank has had the other one
    assert notes.flags == b"\0\0"
    assert notes.take(NUMBERS) == {TERM, USR1} and not notes.take(NUMBERS)
    assert heard == [USR1], "what handled it before hears of it"
    listening.close()


def test_a_signal_that_comes_after_the_agreement_is_another_one(heard: list[int]) -> None:
    notes = Notes(NUMBERS)
    listening = listen(notes)
    send(TERM)
    notes.agree(notes.flags)
    send(TERM)
    assert notes.take(NUMBERS) == {TERM} and notes.flags == b"\1\0"
    listening.close()


def test_what_was_there_before_comes_back(heard: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    notes = Notes(NUMBERS)
    listening = listen(notes)
    assert [signal.getsignal(number) for number in NUMBERS] != before
    listening.close()
    listening.close()
    assert [signal.getsignal(number) for number in NUMBERS] == before
    send(TERM)
    assert notes.flags == b"\0\0" and heard == [TERM]


def test_two_engines_both_note_a_signal(heard: list[int]) -> None:
    one, other = Notes(NUMBERS), Notes(NUMBERS)
    first, second = listen(one), listen(other)
    send(USR1)
    assert one.flags == other.flags == b"\0\1" and heard == [USR1]
    first.close()  # the second one's handler was put there later, and stays
    send(TERM)
    assert (one.flags, other.flags) == (b"\0\1", b"\1\1") and heard == [USR1, TERM]
    second.close()
    send(TERM)
    assert heard == [USR1, TERM, TERM]


def test_without_its_engine_a_handler_only_passes_on(heard: list[int]) -> None:
    listening = listen(Notes(NUMBERS))
    gc.collect()
    send(TERM)
    assert heard == [TERM]
    listening.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_child_dies_of_a_signal_as_it_would_have(closed: bool) -> None:
    """A pool of processes that were forked ends them with SIGTERM; and so does one whose engine is gone."""
    before = signal.signal(TERM, signal.SIG_DFL)
    notes = Notes(NUMBERS)
    listening = listen(notes)
    child = os.fork()
    if not child:
        try:
            if closed:
                later = signal.getsignal(TERM)
                signal.signal(TERM, lambda *args: later(*args))  # type: ignore[operator]
                listening.close()
            os.kill(os.getpid(), TERM)
            signal.pause()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    listening.close()
    signal.signal(TERM, before)


def test_only_the_main_thread_listens() -> None:
    caught: list[Any] = []

    def other() -> None:
        with pytest.raises(EngineError, match="save_on_signal needs") as error:
            check_thread()
        caught.append(error)

    check_thread()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert caught


def test_a_note_is_taken_once_by_whom_it_is_for() -> None:
    one, other = Notes(("a", "b", "c")), Notes(("a", "b", "c"))
    one.note("b")
    other.note("c")
    assert (one.flags, other.flags) == (b"\0\1\0", b"\0\0\1")
    for each in (one, other):
        each.agree(b"\0\1\1")
        assert each.flags == b"\0\0\0"
        assert each.take(("a", "c")) == {"c"} and not each.take(("a", "c"))
        assert each.take(("b",)) == {"b"} and not each.take(("a", "b", "c"))


def test_what_comes_behind_the_agreement_is_noted_anew() -> None:
    notes = Notes(("a",))
    notes.note("a")
    notes.agree(notes.flags)
    notes.note("a")
    assert notes.take(("a",)) == {"a"} and notes.flags == b"\1"
