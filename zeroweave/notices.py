"""What users are told: warnings, at the line of their program that led to them, and a journal of a run's events."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from rich.console import Console

EventKind = Literal["skipped", "fallback", "recompiled", "departed", "schedule"]

_LOG: Final = logging.getLogger("zeroweave")
_KEPT: Final = 1000
"""So many events wait until they are taken; the oldest are dropped first."""
_OWN: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(message: str, rank: int | None = None) -> None:
    """A UserWarning on rank 0, at the innermost line that belongs neither to zeroweave nor to PyTorch or pydantic.

    `rank`: this process's; None where no engine knows it yet: the launcher's RANK, 0 without one.
    """
    if (int(os.environ.get("RANK") or 0) if rank is None else rank) != 0:
        return
    frame = _of_user(sys._getframe(1))
    if frame is None:  # a thread of autograd: the program waits for it in its main thread
        frame = _of_user(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn(message, stacklevel=2)
        return
    # Not `stacklevel`, which counts frames: how many there are depends on who called, and from where.
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from `frame` outwards that is the user's, or None."""
    inside = [_OWN, *map(os.path.abspath, (contextlib.__file__, weakref.__file__)), "<eval_with_key>", "<frozen "]
    for name in ("torch", "pydantic"):
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
            inside.append(os.path.dirname(os.path.abspath(file)) + os.sep)
    while frame is not None and frame.f_code.co_filename.startswith(tuple(inside)):
        frame = frame.f_back
    return frame


def on_stderr() -> Console:
    """Where lines that change in place are shown. Its cursor stays: a process that is ended would leave none."""
    from rich.console import Console

    class Plain(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Plain(stderr=True)


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Gives what is called with what a command is at; standard error shows it.

    On a terminal that is one line, which changes and goes away; elsewhere each is a separate line.
    """
    console = on_stderr()
    if not console.is_terminal:
        yield lambda text: print(f"zeroweave: {text}", file=sys.stderr, flush=True)
        return
    from rich.text import Text

    with console.status("") as status:
        yield lambda text: status.update(Text(f"zeroweave: {text}"))


@dataclass(frozen=True)
class Event:
    """Something that a run did otherwise than before, and the reason, in one line.

    skipped: an optimizer step did not take place. fallback: something runs more slowly than it was meant to.
    recompiled: a region was compiled for other inputs. departed: a step left its schedule. schedule: the next steps
    follow another one.
    """

    kind: EventKind
    reason: str


class Journal:
    """The events of one engine on this rank, until they are taken.

    On rank 0 the logger "zeroweave" has each as well: as information, or as a warning where the user ought to know.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def tell(self, kind: EventKind, reason: str, level: int = logging.INFO) -> None:
        """One more event. `level`: of the logger."""
        self._events.append(Event(kind, reason))
        if self._rank == 0:
            _LOG.log(level, "zeroweave: %s", reason)

    def warn(self, kind: EventKind, reason: str) -> None:
        """One more event that the user ought to know of once: a warning."""
        self._events.append(Event(kind, reason))
        warn(reason, self._rank)

    def take(self) -> tuple[Event, ...]:
        """All that were not taken yet, in their order."""
        taken = tuple(self._events)
        self._events.clear()
        return taken
