"""Where the host's time of one step goes: cProfile of the thread that trains, and of the one that runs backwards."""

from __future__ import annotations

import cProfile
import io
import pstats
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LINES = 60
_PACKAGE = Path(__file__).resolve().parent.parent / "zeroweave"
PER_THREAD = sys.version_info < (3, 12)
"""Does a profile see one thread alone? From Python 3.12 on it sees all."""


def profile(step: Callable[[], object], device: torch.device) -> str:
    """Runs `step` once; the tables of both threads, sorted by own time.

    A device's backwards run in a thread of autograd's own, the same one for all of them. It is reached from inside of
    another small backward. Where a profile sees all threads, there is one table.
    """
    caller = threading.get_ident()
    backward: cProfile.Profile | None = None

    def begin() -> None:
        nonlocal backward
        if PER_THREAD and threading.get_ident() != caller:
            backward = cProfile.Profile()
            backward.enable()

    def end() -> None:
        if backward is not None:
            backward.disable()

    in_backward_thread(begin, device)
    training = cProfile.Profile()
    training.enable()
    step()
    training.disable()
    in_backward_thread(end, device)
    text = f"{'the thread that trains' if PER_THREAD else 'all threads'}\n{table(training)}"
    return text if backward is None else f"{text}\nthe thread that runs backwards\n{table(backward)}"


def in_backward_thread(call: Callable[[], None], device: torch.device) -> None:
    """Runs `call` where a backward on `device` runs: in a thread of autograd's, on a CPU in this one."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    result = leaf * 1
    result.register_hook(lambda gradient: call())
    torch.autograd.backward(result)


def table(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text).sort_stats("tottime")
    for owner, (seconds, calls) in sorted(owners(stats).items(), key=lambda each: -each[1][0]):
        print(f"{1e3 * seconds:9.2f} ms  {calls:7} calls  {owner}", file=text)
    stats.print_stats(LINES)
    return text.getvalue()


def owners(stats: pstats.Stats) -> dict[str, tuple[float, int]]:
    """Seconds and calls by whose code they are in. A function of C counts for the code that has called it."""
    found: dict[str, tuple[float, int]] = {}
    functions: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    for function, (*told, callers) in functions.items():
        by = callers if function[0] == "~" and callers else {function: told}
        for (file, _, _), (_, calls, own, _) in by.items():
            owner = owner_of(file)
            seconds, before = found.get(owner, (0.0, 0))
            found[owner] = seconds + own, before + calls
    return found


def owner_of(file: str) -> str:
    """Whose code lies in a file."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return "zeroweave"
    if "triton" in path.parts or any("inductor" in part for part in path.parts):
        return "compiled code and its launches"
    return "PyTorch" if "torch" in path.parts else "all else"
