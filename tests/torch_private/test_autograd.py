"""Backwards and checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from zeroweave._torch.autograd import checkpoint_segment, past_hooks, recomputing, saves_through_hooks

pytestmark = pytest.mark.oldest


def test_recomputation_is_noticed() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(recomputing())
        return torch.sin(x) * x

    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True, False, False]


def test_each_checkpoint_is_a_segment_of_its_own() -> None:
    seen: list[object] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(checkpoint_segment())
        x = x.sin()
        seen.append(checkpoint_segment())
        return x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False)
    assert seen[0] is seen[1] is not seen[2] and seen[2] is seen[3] and None not in seen
    look(torch.ones(2))
    assert seen[4] is None
    x.sum().backward()
    assert seen[5:] and all(each is None for each in seen[5:]), "what runs again is no first time"


def test_what_is_saved_past_hooks_calls_none_of_them() -> None:
    seen: list[str] = []

    def noting(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda t: (seen.append(name), t)[1], lambda t: t)

    own, x = noting("own"), torch.ones(2, requires_grad=True)

    def run(y: torch.Tensor) -> torch.Tensor:
        assert saves_through_hooks() == bool(others)
        return y.exp()

    others: list[str] = []
    with own:
        result = past_hooks(own, run, (x,))
        assert not seen and saves_through_hooks()
        result.pow(2).sum().backward()
        assert seen == ["own"], "what follows is saved through them"
    assert x.grad is not None and torch.equal(x.grad, 2 * x.exp().pow(2))
    seen.clear()
    others = ["inside"]
    with own, noting("inside"):
        past_hooks(own, run, (x,))
    others = ["outside"]
    with noting("outside"), own:
        past_hooks(own, run, (x,))
    with noting("other"):
        past_hooks(own, run, (x,))
    assert seen == ["inside", "own", "other"] and not saves_through_hooks()
    with own, pytest.raises(ZeroDivisionError):
        past_hooks(own, lambda y: 1 // 0, (x,))
    assert not saves_through_hooks()
