"""What `torch.save` names in its files for tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2


def _as_tensor(
    rebuild: Callable[..., torch.Tensor], _type: Any, arguments: tuple[Any, ...], _state: Any
) -> torch.Tensor:
    """Of a tensor with attributes, or of a class of its own, what is a plain tensor."""
    return rebuild(*arguments)


def _without_state(data: torch.Tensor, *_: Any) -> torch.Tensor:
    """Of a parameter with attributes, its values."""
    return data


REBUILDERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _without_state,
    ("torch._tensor", "_rebuild_from_type_v2"): _as_tensor,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
}
"""By module and name. Why: a reader that calls nothing else runs no code of a file."""
