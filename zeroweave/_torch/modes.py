"""Modes of the program: of the dispatcher, and of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

_SELECTIVE: tuple[type, ...] = (
    vars(checkpoint)["_CachingTorchDispatchMode"],
    vars(checkpoint)["_CachedTorchDispatchMode"],
)


def unseen() -> AbstractContextManager[None]:
    """Inside, selective activation checkpointing does not see operations; other modes do.

    Why: it counts the operations of a forward, and wants the same ones when that runs again. But what is gathered and
    reduced in between differs then. The modes are private, and so is the stack of them.
    """
    return _without_selective() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _without_selective() -> Iterator[None]:
    """Why: see `unseen`. A mode may be between others, which stay in their order."""
    modes: list[Any] = dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in modes):
        yield
        return
    for _ in modes:
        dispatch._pop_mode()
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    try:
        for mode in others:
            dispatch._push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                dispatch._pop_mode()
    finally:
        for mode in modes:
            dispatch._push_mode(mode)
