"""Steps of setting up that must succeed on all ranks, or are taken back on all."""

from __future__ import annotations

from collections.abc import Callable

from zeroweave.ranks.control import Control


def done_by_all(control: Control, step: Callable[[], object], what: str) -> str:
    """Takes a step that may fail; why it has on the first rank where it has, "" where it has on none. Collective."""
    why = ""
    try:
        step()
    except Exception as error:  # of any kind: of CUDA, its libraries, the compiler of kernels
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reasons = control.all_gather_object(why, what)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")
