"""Warnings: told once, by rank 0, at the line of the user's program that led to them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from types import FrameType
from typing import Final

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
    """The innermost frame from `frame` outwards that is the user's; None where there is none."""
    inside = [_OWN, *map(os.path.abspath, (contextlib.__file__, weakref.__file__)), "<eval_with_key>", "<frozen "]
    for name in ("torch", "pydantic"):
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
            inside.append(os.path.dirname(os.path.abspath(file)) + os.sep)
    while frame is not None and frame.f_code.co_filename.startswith(tuple(inside)):
        frame = frame.f_back
    return frame
