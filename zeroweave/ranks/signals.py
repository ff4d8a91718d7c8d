"""SIGTERM and SIGUSR1: what comes to one rank is noted there until all ranks know of it and act together."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final, TypeVar

from zeroweave.errors import EngineError

NUMBERS: Final = (signal.SIGTERM, signal.SIGUSR1)
K = TypeVar("K", bound=Hashable)


class Notes:
    """What comes to single ranks of one engine, noted there until all ranks know of it and act together.

    `kinds`: what can be noted, the same on all ranks.
    """

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        self._noted = dict.fromkeys(kinds, False)
        self._agreed: set[Hashable] = set()

    def note(self, kind: Hashable) -> None:
        """This rank has it."""
        self._noted[kind] = True

    @property
    def flags(self) -> bytes:
        """What this rank has noted: a byte each."""
        return bytes(self._noted.values())

    def agree(self, flags: bytes) -> None:
        """`flags` of any rank. What comes from now on is noted anew."""
        for kind, noted in zip(self._noted, flags, strict=True):
            if noted:
                self._noted[kind] = False
                self._agreed.add(kind)

    def take(self, kinds: Sequence[K]) -> frozenset[K]:
        """Which of these all ranks know of, once."""
        taken = frozenset(kind for kind in kinds if kind in self._agreed)
        self._agreed -= taken
        return taken


def listen(notes: Notes) -> ExitStack:
    """Notes signals by their numbers until what this returns is closed, or `notes` are gone. In the main thread.

    Then, and in forked children, they do what they did before. What handled them before hears of noted ones as well.
    """
    listening = ExitStack()
    for number in NUMBERS:
        listening.callback(_Handler(number, notes).close)
    return listening


class _Handler:
    """Handles one signal of this process. It does not keep the notes, and so the engine, alive."""

    def __init__(self, number: signal.Signals, notes: Notes) -> None:
        self._number, self._notes, self._process = number, weakref.ref(notes), os.getpid()
        self._open = True
        self._before: Any = signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        notes = self._notes()
        if self._open and notes is not None and os.getpid() == self._process:
            notes.note(self._number)
        elif self._before is signal.SIG_DFL:
            signal.signal(self._number, signal.SIG_DFL)
            os.kill(os.getpid(), self._number)
        if callable(self._before):
            self._before(number, frame)

    def close(self) -> None:
        """Another handler may have come after this one, and call it: then it stays, and only passes on."""
        self._open = False
        mine = signal.getsignal(self._number) is self
        if mine and self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._before)


def check_thread() -> None:
    """EngineError where this thread cannot listen to signals."""
    if threading.current_thread() is not threading.main_thread():
        raise EngineError(
            "checkpoint.save_on_signal needs zeroweave.initialize in the main thread, which handles signals"
        )
