"""Dispatch modes that do not see what the engine does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zeroweave._torch.modes import unseen

pytestmark = pytest.mark.oldest


class Watch(TorchDispatchMode):
    def __init__(self, seen: list[str], name: str) -> None:
        super().__init__()
        self._seen, self._name = seen, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(f"{self._name} {func}")
        return func(*args, **(kwargs or {}))


def modes(seen: list[str]) -> tuple[Any, ...]:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(f"policy {func}")
        return CheckpointPolicy.PREFER_RECOMPUTE

    return Watch(seen, "outer"), create_selective_checkpoint_contexts(policy)[0], Watch(seen, "inner")


def test_selective_checkpointing_does_not_see_what_others_do() -> None:
    seen: list[str] = []
    x = torch.ones(2)
    with ExitStack() as stack:
        for mode in modes(seen):
            stack.enter_context(mode)
        before = _get_current_dispatch_mode_stack()
        with unseen():
            x.mul(2)
        assert sorted(seen) == ["inner aten.mul.Tensor", "outer aten.mul.Tensor"]
        seen.clear()
        with pytest.raises(ZeroDivisionError), unseen():
            raise ZeroDivisionError
        assert _get_current_dispatch_mode_stack() == before
        x.add(1)
    assert sorted(seen) == ["inner aten.add.Tensor", "outer aten.add.Tensor", "policy aten.add.Tensor"]


def test_where_nobody_watches_nothing_changes() -> None:
    seen: list[str] = []
    with unseen():
        torch.ones(2).mul(2)
    with Watch(seen, "outer"), unseen():
        torch.ones(2).mul(2)
    assert "outer aten.mul.Tensor" in seen
