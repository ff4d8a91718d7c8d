"""Calls of the engine inside of code that the program compiles by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REASON: Final = "the engine compiles the model itself, and nothing can span its calls"


def untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`method`, at which a program's own `torch.compile` breaks its graph.

    The engine compiles what the model computes. Around that it talks to other ranks and exchanges parameters, and
    Dynamo would end with an internal error in the middle of it.
    """

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            # What the engine compiles itself is compiled in there as usual. Made here: it imports all of Dynamo.
            return torch.compiler.disable(method, reason=_REASON)(*args, **kwargs)
        return method(*args, **kwargs)

    return called
