"""SIGTERM and SIGUSR1: what comes to one rank is noted there until all ranks know of it and act together."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Hashable, Sequence
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


class Signals:
    """The signals of one engine. None is noted before `listen`, nor after `close` or once the engine is gone.

    Then, and in forked children, they do what they did before. What handled them before `listen` hears of noted ones
    as well. `notes`: where they are noted, by their numbers, beside other things.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._handlers: list[_Handler] = []

    def listen(self) -> None:
        """From now on signals are noted. In the main thread."""
        self._handlers = [_Handler(number, self) for number in NUMBERS]

    def note(self, number: signal.Signals) -> None:
        self._notes.note(number)

    def take(self) -> frozenset[signal.Signals]:
        """The signals that all ranks know of, once."""
        return self._notes.take(NUMBERS)

    def close(self) -> None:
        """What handled signals before handles them again."""
        while self._handlers:
            self._handlers.pop().close()


class _Handler:
    """Handles one signal of this process. It does not keep the engine alive."""

    def __init__(self, number: signal.Signals, signals: Signals) -> None:
        self._number, self._signals, self._process = number, weakref.ref(signals), os.getpid()
        self._open = True
        self._before: Any = signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signals = self._signals()
        if self._open and signals is not None and os.getpid() == self._process:
            signals.note(self._number)
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
